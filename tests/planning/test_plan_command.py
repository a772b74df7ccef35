"""The output and the exit code of `rlhf plan`, refusals of `rlhf train`, and runs that it never refuses."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from runs import make_model, prompts_file
from test_memory_planned import GPU, QWEN, planned

import rlhf
from rlhf.cli import main
from rlhf.commands.probe import as_long_as_measured, measured_rates
from rlhf.config.files import merge_overrides, parse_overrides
from rlhf.config.load import load_train, train_config
from rlhf.errors import UserError
from rlhf.factory import context
from rlhf.guard.lint import lint
from rlhf.planning import machine
from rlhf.planning.machine import host_memory, parse_size, read_rates, write_rates
from rlhf.planning.plan import RULE, Machine, least_of, make_plan
from rlhf.planning.text import SURE, WITHOUT_WRITTEN_OUT, describe_plan, larger_passes, refusal, table
from rlhf.runtime.engine import Engine
from rlhf.section import Facts

ROOT = Path(__file__).resolve().parents[2]
GB = 1e9


LONG_SFT = [
    "policy.model=Qwen/Qwen2.5-0.5B",
    "algorithm.preset=sft",
    "data.sft.path=texts.jsonl",
    "data.sft.max_tokens=1000",
]


def on(size: float, processes: int = 1) -> Machine:
    return Machine(device="cuda", memory=size * GB, processes=processes)


def tiny(folder: Path) -> list[str]:
    """The settings of a run that takes a second."""
    prompts, model = prompts_file(folder), make_model(folder / "model")
    return [
        f"policy.model={model}",
        f"data.prompts.path={prompts}",
        "data.prompts.max_prompt_tokens=8",
        "data.chat_template=none",
        "algorithm.preset=grpo",
        "reward.source={type: rules, rules: [{type: length, max: 3}]}",
        "sampling.max_new_tokens=4",
        "sampling.completions_per_prompt=2",
        "batch.prompts_per_step=2",
        "schedule.steps=1",
        "eval.every=0",
        "run.device=cpu",
        f"run.out_dir={folder / 'run'}",
        f"run.cache_dir={folder / 'cache'}",
    ]


@pytest.fixture
def empty(tmp_path: Path) -> str:
    """A configuration file without settings."""
    file = tmp_path / "empty.yaml"
    file.write_text("{}\n", encoding="utf-8")
    return str(file)


@pytest.mark.parametrize(
    ("text", "size"),
    [("24GB", 24e9), ("24", 24e9), ("80GiB", 80 * 2**30), ("512mb", 512e6), ("1.5 TB", 1.5e12), ("100B", 100.0)],
)
def test_sizes_are_read(text: str, size: float) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "much", "-3GB", "0GB", "24GX"])
def test_what_is_no_size_is_refused_by_name(text: str) -> None:
    with pytest.raises(UserError, match=r"--memory is .* write a size such as 24GB"):
        parse_size(text)


def test_the_table_adds_up_and_marks_the_peak() -> None:
    plan = planned("ppo", on(24))
    lines = table(plan)
    assert lines[0].split() == ["GB", "load", "rollout", "annotate", "update", "export"]
    assert lines[-1].split()[0] == "all"
    assert [cell.endswith("*") for cell in lines[-1].split()[1:]] == [False, False, False, True, False]
    for phase in plan.memory.phases:
        assert plan.memory.of(phase) == pytest.approx(
            sum(item.bytes for item in plan.memory.items if item.phase == phase)
        )


def test_the_verdict_the_largest_micro_batch_and_the_cures_agree() -> None:
    plan = planned("ppo", on(24), critic__init="policy")
    assert plan.fits is False
    cures = list(plan.cures())
    names = [cure.cure.name for cure in cures]
    order = [
        "recompute activations",
        "smaller micro-batches",
        "moments in 8 bits",
        "adapters (LoRA)",
        "frozen weights in 16 bits",
        "frozen weights in 4 bits",
    ]
    assert [name for name in names if name in order] == order
    assert cures[0].peak == pytest.approx(plan.peak - cures[0].saving)
    for before, after in pairwise(cures):
        assert after.peak == pytest.approx(before.peak - after.saving)
    fitting = planned("sft", on(40), batch__prompts_per_step=64)
    largest = fitting.largest_micro_batch()
    assert largest is not None
    assert planned("sft", on(40), batch__prompts_per_step=64, batch__micro_batch_size=largest).fits
    assert not planned("sft", on(40), batch__prompts_per_step=64, batch__micro_batch_size=largest + 1).fits
    assert planned("sft", on(10)).largest_micro_batch() is None


def test_the_settings_of_a_cure_are_settings_of_a_configuration() -> None:
    plan = planned("ppo", on(24), critic__init="policy")
    base = plan.config.model_dump(mode="json", exclude_unset=True)
    for cures in ([*plan.cures()], *([cure] for cure in plan.sharded())):
        words = [word for cure in cures for word in cure.settings.split()]
        changed = train_config(merge_overrides(base, parse_overrides(words)))
        assert make_plan(changed, plan.machine).peak == pytest.approx(cures[-1].peak)


def test_zero_is_offered_beside_the_cures_of_one_process() -> None:
    plan = planned("sft", on(12, processes=8))
    assert [cure.settings for cure in plan.sharded()][:2] == ["sharding=zero2", "sharding=zero3"]
    shares = plan.shares()
    assert shares["none"] > shares["zero1"] > shares["zero2"] > shares["zero3"]


def test_the_plan_says_why_zero2_takes_more_than_zero1() -> None:
    where, many = Machine(device="cuda", processes=8), {"batch__prompts_per_step": 256, "batch__micro_batch_size": 32}
    many_rows = planned("sft", where, **many)
    shares, lines = many_rows.shares(), describe_plan(many_rows)
    assert shares["zero2"] > shares["zero1"]
    assert lines[lines.index(WITHOUT_WRITTEN_OUT) - 1].startswith("peak of each of 8 processes: none ")
    assert WITHOUT_WRITTEN_OUT not in describe_plan(planned("sft", where))
    padded = planned("sft", where, policy__packing="off", **many).shares()
    assert padded["zero2"] < padded["zero1"], "it is the layers alone that make the difference"


def test_what_cannot_fit_is_refused_with_the_plan_and_the_cures() -> None:
    config = planned("ppo", critic__init="policy").config
    message = refusal(config, on(24))
    assert message is not None
    assert message.startswith("does-not-fit: weights, gradients and moments alone take 62.22 GB")
    for part in ("the GPU has 24.00 GB", "Nothing was loaded", "policy  ", "moments", "policy.lora.r=16", "which fits"):
        assert part in message
    assert message.endswith("To run it nevertheless: guard.allow=[does-not-fit]")
    allowed = planned("ppo", critic__init="policy", guard__allow=[RULE]).config
    assert refusal(allowed, on(24)) is None


def test_a_gpu_with_room_is_told_of_larger_passes() -> None:
    """The whole minibatch of 64 rows if it fits with a fifth to spare, a part of it on a smaller card."""
    plan = planned("grpo", on(200))
    assert larger_passes(plan.config, plan.machine) == (
        "batch.micro_batch_size=64 fits this GPU too: fewer passes are faster, and the result is the same"
    )
    whole = plan.config.model_copy(update={"batch": plan.config.batch.model_copy(update={"micro_batch_size": 64})})
    sizes = []
    for memory in (30, 40, 60, 100, 200):
        note = larger_passes(plan.config, on(memory))
        sizes.append(4 if note is None else int(note.split("=")[1].split()[0]))
        batch = plan.config.batch.model_copy(update={"micro_batch_size": sizes[-1]})
        changed = plan.config.model_copy(update={"batch": batch})
        assert note is None or make_plan(changed, on(SURE * memory)).fits
    assert sizes == sorted(sizes)
    assert set(sizes) > {4, 64}
    assert larger_passes(whole, on(200)) is None
    assert larger_passes(plan.config, Machine(device="cpu", memory=200 * GB)) is None
    by_tokens = planned("grpo", on(200), batch__micro_batch_tokens=1024)
    assert larger_passes(by_tokens.config, by_tokens.machine) is None


def test_a_run_is_never_refused_for_its_rows() -> None:
    plan = planned("sft", on(27), batch__micro_batch_size=512, batch__prompts_per_step=512)
    assert plan.fits is False
    least = least_of(plan.config, plan.machine)
    assert least == pytest.approx(16 * 1_543_714_304)
    assert refusal(plan.config, plan.machine) is None
    assert refusal(plan.config, on(least / GB * 0.999)) is not None


def test_lint_knows_the_rule_and_judges_it_only_where_the_memory_is_known() -> None:
    config = planned("sft").config
    assert RULE not in [violation.rule.name for violation in lint(config, Facts())]
    (broken,) = [v for v in lint(config, Facts(memory=24 * GB, device="cuda")) if v.rule.name == RULE]
    assert str(broken.value) == "24.70 GB on a device with 24.00 GB"


def test_a_model_that_is_not_known_is_never_refused() -> None:
    tree = {
        "policy": {"model": "some/unknown-model"},
        "algorithm": {"preset": "sft"},
        "data": {"sft": {"path": "rows.jsonl"}},
        "schedule": {"steps": 1},
    }
    assert refusal(train_config(tree), on(0.001)) is None
    with pytest.raises(UserError, match=r"the shape of 'some/unknown-model' is not known .* start that run first"):
        make_plan(train_config(tree), GPU)


def test_train_refuses_what_cannot_fit_before_it_loads_a_model(
    tmp_path: Path, empty: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = tiny(tmp_path)
    monkeypatch.setattr(Engine, "total_memory", lambda self: 10_000.0)
    started = time.perf_counter()
    assert main(["train", empty, *settings]) == 2
    assert time.perf_counter() - started < 10
    error = capsys.readouterr().err
    assert "does-not-fit: weights, gradients and moments alone take 0.000 GB" in error
    assert "guard.allow=[does-not-fit]" in error
    assert not (tmp_path / "run").exists()
    assert main(["train", empty, *settings, "guard.allow=[does-not-fit]"]) == 0
    assert (tmp_path / "run" / "model").is_dir()


def test_the_check_of_a_run_takes_well_under_a_second(tmp_path: Path, empty: str) -> None:
    config = load_train(empty, tiny(tmp_path))
    engine = Engine(context.make_engine(config.run, config.sharding).device)
    started = time.perf_counter()
    context._check_memory(config, engine)
    assert time.perf_counter() - started < 0.3


def printed(capsys: pytest.CaptureFixture[str], words: Sequence[str], code: int = 0) -> str:
    capsys.readouterr()  # the messages while the model was made
    assert main(list(words)) == code
    shown = capsys.readouterr()
    assert shown.err == ""
    return shown.out


def test_the_command_prints_the_plan(tmp_path: Path, empty: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, ["plan", empty, *tiny(tmp_path), "--memory", "4GB"])
    for part in ("models: policy 0M, reference 0M", "rows of 8 + 4 tokens", "policy     weights", "it fits"):
        assert part in out
    assert "largest batch.micro_batch_size that fits: 4" in out
    assert "operations a step" in out
    assert "--probe runs three steps" in out
    large = "policy.model=meta-llama/Llama-3.1-8B"
    out = printed(capsys, ["plan", empty, *tiny(tmp_path), large, "--device", "cuda", "--memory", "24GB"], code=1)
    assert "it does not fit" in out
    assert "What to change, the cheapest first" in out
    assert "not even one row" not in out
    assert "with these the run fits, and batch.micro_batch_size up to " in out
    assert re.search(r"operations a step: [\d,.]+ TFLOP \(rollout [\d,.]+, ", out)


def test_the_command_prints_json(tmp_path: Path, empty: str, capsys: pytest.CaptureFixture[str]) -> None:
    settings = tiny(tmp_path)
    plan = json.loads(printed(capsys, ["plan", empty, *settings, "--json", "--memory", "80GiB", "--gpus", "2"]))
    assert plan["device"] == "cpu"  # by run.device
    assert plan["memory"] == 80 * 2**30
    assert plan["peak"] == max(plan["phases"].values()) == plan["phases"][plan["peak_phase"]]
    assert plan["peak"] == pytest.approx(
        sum(item["bytes"] for item in plan["items"] if item["phase"] == plan["peak_phase"])
    )
    assert set(plan["shares"]) == {"none", "zero1", "zero2", "zero3"}
    assert plan["fits"] is True
    assert plan["seconds_per_step"] is None


def test_a_wrong_option_is_told_by_its_name(tmp_path: Path, empty: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", empty, *tiny(tmp_path), "--gpus", "0"]) == 2
    assert "--gpus is 0: it has to be at least 1" in capsys.readouterr().err
    assert main(["plan", empty, *tiny(tmp_path), "--memory", "lots"]) == 2
    assert "--memory is 'lots'" in capsys.readouterr().err


def test_memory_from_python_is_a_size_or_gigabytes(tmp_path: Path) -> None:
    tree = merge_overrides({}, parse_overrides([*tiny(tmp_path), "run.device=cuda"]))
    ask = inspect.unwrap(rlhf.plan)
    assert ask(memory=24, **tree).machine.memory == ask(memory="24GB", **tree).machine.memory == 24e9
    for wrong in (-3, 24e9, True):
        with pytest.raises(UserError, match=r"^memory is .*: write a size such as 24GB .* a number alone is in GB"):
            ask(memory=wrong, **tree)
    with pytest.raises(UserError, match=r"^prompt_tokens is 0"):
        ask(prompt_tokens=0, **tree)


def test_rows_beyond_the_context_of_the_model_are_refused(
    tmp_path: Path, empty: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = tiny(tmp_path)  # a context of 64
    assert "rows of 60 + 4 tokens" in printed(capsys, ["plan", empty, *settings, "--prompt-tokens", "60"])
    told = (
        r"--prompt-tokens, --completion-tokens: rows of {} \+ {} tokens are longer than the model's context of 64: "
        "write smaller numbers"
    )
    for options, prompt, completion in (
        (["--prompt-tokens", "61"], 61, 4),
        (["--completion-tokens", "64"], 1, 64),
        (["--prompt-tokens", "5000", "--probe"], 5000, 4),
    ):
        assert main(["plan", empty, *settings, *options]) == 2
        assert re.search(told.format(prompt, completion), capsys.readouterr().err)
    with pytest.raises(UserError, match=r"^prompt_tokens, completion_tokens: rows"):
        rlhf.plan(prompt_tokens=61, **merge_overrides({}, parse_overrides(settings)))
    kept = [word for word in settings if word.startswith(("policy", "run", "schedule"))]
    sft = merge_overrides({}, parse_overrides([*kept, "algorithm.preset=sft", "data.sft.path=texts.jsonl"]))
    step = rlhf.plan(prompt_tokens=60, **sft).layout.step
    assert (step.prompt, step.completion) == (60, 4)


def test_the_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    out = capsys.readouterr().out
    for option in ("--memory", "--gpus", "--device", "--prompt-tokens", "--completion-tokens", "--probe", "--json"):
        assert option in out


def test_a_comparison_is_planned_arm_by_arm(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["start=Qwen/Qwen2.5-0.5B", "--memory", "80GB", "--json"]
    plans = json.loads(printed(capsys, ["plan", str(ROOT / "configs" / "compare.yaml"), *words]))
    assert len(plans) > 1
    assert all(plan["peak"] > 0 for plan in plans.values())


def test_python_gives_the_plan_of_the_command(tmp_path: Path, empty: str, capsys: pytest.CaptureFixture[str]) -> None:
    settings = tiny(tmp_path)
    plan = rlhf.plan(
        policy={"model": QWEN},
        algorithm={"preset": "sft"},
        data={"sft": {"path": "texts.jsonl", "max_tokens": 256}},
        steps=10,
        memory="24GB",
        device="cuda",
    )
    assert plan.fits is False
    assert plan.memory.peak_phase == "update"
    shown = json.loads(printed(capsys, ["plan", empty, *settings, "--json", "--memory", "4GB"]))
    keys = dict(word.split("=", 1) for word in settings if "{" not in word)
    numbers = {key: int(value) if value.isdigit() else value for key, value in keys.items()}
    numbers["reward.source"] = {"type": "rules", "rules": [{"type": "length", "max": 3}]}
    assert rlhf.plan(empty, memory="4GB", **numbers).as_dict() == shown
    reward = rlhf.plan(
        model={"model": QWEN}, data={"preferences": {"path": "pairs.jsonl"}}, memory="80GB", device="cuda"
    )
    assert [role.name for role in reward.layout.roles] == ["reward model"]


def test_the_plan_imports_no_torch(tmp_path: Path, empty: str) -> None:
    make_model(tmp_path / "model")
    code = (
        "import sys; from rlhf.cli import main\n"
        f"main({['plan', empty, *tiny(tmp_path), '--memory', '4GB', '--device', 'cuda']!r})\n"
        "print(*[name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == ""


def test_a_probe_measures_three_steps_and_keeps_the_rates(
    tmp_path: Path, empty: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = tiny(tmp_path)
    out = printed(capsys, ["plan", empty, *settings, "--probe"])
    assert "measured in 3 steps:" in out
    assert "seconds a step:" in out
    assert re.search(r"measured seconds a step: [\d.e-]+, for rows of \d+ tokens on average", out)
    assert not (tmp_path / "run").exists()
    rates = read_rates(str(tmp_path / "cache"), "cpu", "float32")
    assert set(rates) == {"rollout", "annotate", "update"}
    assert all(rate > 0 for rate in rates.values())
    plan = json.loads(printed(capsys, ["plan", empty, *settings, "--json"]))
    step = plan["seconds_per_step"]
    assert step == pytest.approx({phase: plan["operations"][phase] / rates[phase] for phase in rates})
    assert plan["seconds_per_run"] == pytest.approx(sum(step.values()))


def test_the_rates_of_a_probe_are_for_rows_as_long_as_its_own() -> None:
    plan = make_plan(train_config(merge_overrides({}, parse_overrides(LONG_SFT))), on(24))
    step = plan.layout.step
    timings = [{"tokens_per_second": step.rows * 20.0, "seconds": {"data": 1.0, "update": 4.0}}] * 3
    like = as_long_as_measured(plan, timings)
    assert like.layout.step.length == pytest.approx(100, abs=1)
    rate = measured_rates(like, timings)["update"]
    assert rate == pytest.approx(like.operations()["update"] / 4)
    assert rate < plan.operations()["update"] / 4 / 5  # the file allows rows of 1,000 tokens


def test_rates_of_one_device_stay_beside_those_of_another(tmp_path: Path) -> None:
    write_rates(str(tmp_path), "cpu", "float32", {"update": 1e9})
    write_rates(str(tmp_path), "cuda", "bfloat16", {"update": 1e14})
    assert read_rates(str(tmp_path), "cpu", "float32") == {"update": 1e9}
    assert read_rates(str(tmp_path), "cuda", "bfloat16") == {"update": 1e14}
    assert read_rates(str(tmp_path), "cpu", "bfloat16") == {}


def test_the_memory_of_a_container_is_what_its_limit_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    free = host_memory()
    assert free > 0
    (tmp_path / "memory.max").write_text("3000000\n")
    (tmp_path / "memory.current").write_text("2500000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 400000\n")
    assert host_memory() == 900_000
    (tmp_path / "memory.max").write_text("max\n")
    assert host_memory() == pytest.approx(free, rel=0.5)
