"""The benchmarks run, at toy size; their speed is measured in benchmarks/."""

from __future__ import annotations

import gzip
import importlib
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from stored_templates import chat_template
from transformers import AutoModelForCausalLM, AutoTokenizer

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
TRAINERS = ("sft", "reward", "dpo", "grpo", "rloo", "ppo")


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    names = ("peers.work", "peers.real", "peers.options", "peers.ours", "side_by_side", "floor", "scaling", "gpu")
    yield {name: importlib.import_module(name) for name in names}
    for name in (*names, "peers", "peers.runs"):
        sys.modules.pop(name, None)


@pytest.fixture
def sizes(modules: dict[str, ModuleType]) -> Any:
    return modules["peers.work"].Sizes(
        rows=4, prompts=2, group=2, ppo_prompts=16, ppo_epochs=2, ppo_minibatches=2, new_tokens=4
    )


@pytest.mark.parametrize("name", ["json_table", "staleness"])
def test_tables_need_no_matplotlib(name: str) -> None:
    """Only their charts do, by the extra `notebook`."""
    code = f"import sys; sys.modules['matplotlib'] = None; sys.path.insert(0, {str(BENCHMARKS)!r}); import {name}"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("steps, halves", [(1, None), (2, [0.1, 0.2])])
def test_the_table_of_a_run_of_few_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int, halves: list[float] | None
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    table = importlib.import_module("json_table")
    row = {"parts": dict.fromkeys(table.PARTS, 1.0)}
    metrics = {"eval/kl": 0.2, "eval/score": 1.0, "eval/length": 3.0}
    (tmp_path / "judged.json").write_text(json.dumps({"rows": [row], "metrics": metrics}))
    lines = [{"critic/explained_variance": 0.1 * step, "part/full/mean": 1.0} for step in range(1, steps + 1)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    cell = table.read_cell(tmp_path)
    assert cell.get("explained_variance") == (None if halves is None else pytest.approx(halves))
    assert "full_in_training" not in cell


@pytest.mark.beside
@pytest.mark.parametrize("trainer", TRAINERS)
def test_our_side_does_the_work_that_the_peer_does(
    tmp_path: Path, modules: dict[str, ModuleType], sizes: Any, trainer: str
) -> None:
    work, ours = modules["peers.work"], modules["peers.ours"]
    workload = work.make_work(tmp_path, "toy", 3, sizes)
    assert workload.parameters > 1e5
    assert work.Workload.read(tmp_path) == workload
    job = work.Job(trainer, 3, str(tmp_path), sizes=sizes, threads=torch.get_num_threads())
    job.write(tmp_path / "job.json")
    assert work.Job.read(str(tmp_path / "job.json")) == job
    result = ours.run(job, tmp_path / "run")
    assert len(result["steps"]) == 2
    assert all(seconds > 0 for seconds in result["steps"])
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == 3
    if trainer in ("grpo", "rloo"):
        assert lines[-1]["policy/optimizer_steps"] == 1
        assert lines[-1]["completion/count"] == 3 * sizes.prompts * sizes.group
    if trainer == "ppo":
        assert lines[-1]["policy/optimizer_steps"] == sizes.ppo_epochs * sizes.ppo_minibatches
        assert lines[-1]["completion/count"] == 3 * sizes.ppo_prompts
    else:
        assert result["first"]["loss"] == pytest.approx(lines[0]["loss/total"])
        assert result["first"]["gradient"] == pytest.approx(lines[0]["policy/grad_norm"])
    if trainer in work.ONLINE:
        assert len(result["generated"]) == 2
        assert lines[0]["completion/length"] == sizes.new_tokens, "the first step's completions are the written ones"
    floors = modules["floor"].floors(trainer, workload, sizes, 4)
    for name in floors.keys() - {"reference"} if trainer != "rloo" else ():
        assert any(name in phases for phases in result["phases"]), name


def test_our_side_reads_rows_in_the_order_of_the_files(
    tmp_path: Path, modules: dict[str, ModuleType], sizes: Any
) -> None:
    work, ours = modules["peers.work"], modules["peers.ours"]
    work.make_work(tmp_path, "toy", 2, sizes)
    rows = (tmp_path / "sft.jsonl").read_text().splitlines()
    losses = []
    for order in (rows, rows[sizes.rows :] + rows[: sizes.rows]):
        (tmp_path / "sft.jsonl").write_text("\n".join(order))
        job = work.Job("sft", 2, str(tmp_path), sizes=sizes, threads=1)
        losses.append(ours.run(job, tmp_path / f"run{len(losses)}")["first"]["loss"])
    assert losses[0] != losses[1]
    assert torch.randperm(50).tolist() != list(range(50)), "the order is put back afterwards"


def test_reward_model_begins_with_the_head_of_the_work(
    tmp_path: Path, modules: dict[str, ModuleType], sizes: Any
) -> None:
    work, ours = modules["peers.work"], modules["peers.ours"]
    work.make_work(tmp_path, "toy", 2, sizes)
    job = work.Job("reward", 2, str(tmp_path), sizes=sizes, threads=1)
    with_head = ours.run(job, tmp_path / "run")["first"]["loss"]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "reward")
    model = importlib.import_module("transformers").AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "reward"
    )
    pairs = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text().splitlines()[: sizes.rows]]
    gaps = []
    for pair in pairs:
        texts = [pair["prompt"] + pair[side] + tokenizer.eos_token for side in ("chosen", "rejected")]
        with torch.no_grad():
            chosen, rejected = (model(**tokenizer(text, return_tensors="pt")).logits[0, 0] for text in texts)
        gaps.append(chosen - rejected)
    assert with_head == pytest.approx(float(-torch.nn.functional.logsigmoid(torch.stack(gaps)).mean()), rel=1e-5)


def test_a_floor_by_hand(modules: dict[str, ModuleType], sizes: Any) -> None:
    floor, work = modules["floor"], modules["peers.work"]
    layers, width, _, vocabulary = work.SHAPES["toy"]
    workload = work.synthetic_workload("toy")
    assert (workload.body, workload.head) == (layers * (4 * width**2 + 3 * width * 192), width * vocabulary)
    update = floor.floors("sft", workload, sizes, 4)["update"]
    tokens, side = 4 * (40 + 56), 4 * 56
    assert update.flops == 6 * (tokens * workload.body + side * workload.head)
    sampled = floor.floors("grpo", workload, sizes, 4, new_tokens=3.0)["update"]
    assert sampled.flops == 6 * ((2 * 40 + 4 * 3) * workload.body + 4 * 3 * workload.head)
    rates = floor.Rates(few=1e9, many=2e9, memory=1e6)
    assert floor.Floor(4e9, 5e6).seconds(rates) == 5.0
    assert floor.Floor(4e9, 1e6).seconds(rates) == 2.0
    assert floor.Floor(4e9, 1e6, few_rows=True).seconds(rates) == 4.0
    assert floor.mean([rates, floor.Rates(few=3e9, many=4e9, memory=3e6)]) == floor.Rates(2e9, 3e9, 2e6)
    line = floor.DistanceRow("sft", "update", 8.0, floor.Floor(4e9, 1e6), rates).line()
    assert line == "| sft | update | 8.0000 | 2.0000 | 4.0 | 0 | 1 / 2 / 0.0 |"
    assert line.count("|") == floor.HEAD.count("|")


def test_products_of_grouped_queries_and_heads_of_a_width_of_their_own(modules: dict[str, ModuleType]) -> None:
    work = modules["peers.work"]
    config = work.llama_config("toy")  # 2 layers of width 64, inner 192, vocabulary 256
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = 4, 1, 8
    attention = 64 * 32 + 2 * 64 * 8 + 32 * 64
    assert work.products(config) == (2 * (attention + 3 * 64 * 192), 64 * 256)


def result_of(steps: list[float], **more: Any) -> dict[str, Any]:
    first = {"loss": 0.5, "gradient": 2.0}
    common = {"phases": [{"update": 1.0}], "tokens": [10.0], "generated": [], "first": first, "peak_rss_mb": 100.0}
    return {"steps": steps, **common, **more}


def test_ratios_are_of_the_medians_of_each_round(modules: dict[str, ModuleType], sizes: Any) -> None:
    side, work = modules["side_by_side"], modules["peers.work"]
    job, workload = work.Job("dpo", 4, "", sizes=sizes), work.synthetic_workload("toy")
    rounds = [
        (result_of([1.0, 2.0, 9.0], reference=4.0), result_of([6.0])),
        (result_of([1.0], reference=0.0), result_of([4.0], peak_rss_mb=200.0)),
    ]
    summary = side.summarize(job, workload, rounds)
    assert summary["ratio_range"] == [6.0 / 3.0, 4.0]  # 2 s a step, and of the reference of 4 steps 1 s
    assert summary["ratio"] == statistics.median([2.0, 4.0])
    row = side.row("dpo", "memory", summary, "tiny")
    assert "| dpo | memory | 3.00 [2.00, 4.00] | 1.8 |" in row
    assert row.count("|") == side.HEAD.splitlines()[0].count("|") == side.HEAD.splitlines()[1].count("|")
    assert "| 5 / 2 |" in row  # 10 tokens in 2 s and in 5 s; both sides' are the same
    assert row.endswith("| 100 / 200 (0.50) |")
    assert side.split("dpo", summary) == "dpo: ours update 1.000, the rest 1.000; TRL update 1.000, the rest 4.000"
    check = "dpo: loss 0.500000 and 0.500000, gradient 2 and 2: the same"
    assert side.check("dpo", summary) == check


def test_gflops_count_the_tokens_that_each_side_sampled(modules: dict[str, ModuleType], sizes: Any) -> None:
    side, work = modules["side_by_side"], modules["peers.work"]
    job, workload = work.Job("grpo", 3, "", sizes=sizes), work.synthetic_workload("toy")
    rounds = [(result_of([1.0], generated=[8, 16]), result_of([2.0], generated=[16, 16]))]
    summary = side.summarize(job, workload, rounds)
    assert summary["completion_tokens"] == [3.0, 4.0]  # of 2 x 2 completions
    assert summary["tokens_per_second"] == [10.0, (10.0 + 4.0) / 2.0]

    def flops(tokens: float) -> float:
        return 8 * ((2 * 40 + 4 * tokens) * workload.body + 4 * tokens * workload.head)

    assert summary["gflops"] == pytest.approx([flops(3.0) / 1e9, flops(4.0) / 2e9])
    assert side.check("grpo", summary).endswith("the same; later completions of 3.0 and 4.0 tokens")


@pytest.mark.parametrize(
    "loss, gradient, same",
    [(0.5, 2.0, True), (0.5004, 2.001, True), (0.502, 2.0, False), (0.5, 2.01, False), (float("nan"), 2.0, False)],
)
def test_first_steps_are_compared(modules: dict[str, ModuleType], loss: float, gradient: float, same: bool) -> None:
    other = result_of([1.0], first={"loss": loss, "gradient": gradient})
    assert modules["side_by_side"].same_first_step(result_of([1.0]), other, 1e-3) is same


def test_output_says_where_bfloat16_is_no_faster(modules: dict[str, ModuleType]) -> None:
    rates = modules["side_by_side"].ProductRates
    slow, fast = rates((2e11, 1.9e11), (4e10, 4e10)), rates((2e11, 2e11), (6e11, 5e11))
    assert "200 to 190 GFLOP/s in float32, 40 to 40 in bfloat16" in slow.text("float32")
    assert "no fast bfloat16" in slow.text("bfloat16")
    assert "no fast bfloat16" not in slow.text("float32")
    assert "no fast bfloat16" not in fast.text("bfloat16")


TEMPLATE = chat_template("benchmark")


@pytest.fixture
def chat_model(tmp_path: Path, modules: dict[str, ModuleType], sizes: Any) -> tuple[Path, Path]:
    """A model folder with a chat template, and a gzipped file of pairs."""
    folder, pairs = tmp_path / "model", tmp_path / "pairs.jsonl.gz"
    modules["peers.work"].make_work(folder, "toy", 1, sizes)
    tokenizer = AutoTokenizer.from_pretrained(folder / "policy")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "policy")
    rows = [{"prompt": f"w{i} w{i + 1}", "chosen": f" w{i + 2} w{i + 3}", "rejected": f" w{i + 4}"} for i in range(6)]
    rows.append({"prompt": "w1 " * 90, "chosen": " w1", "rejected": " w2"})
    rows.append({"prompt": "w1", "chosen": "w1", "rejected": "w2"})  # grows together with the prompt
    with gzip.open(pairs, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return folder / "policy", pairs


def test_real_pairs_are_written_by_the_template_and_encoded_alike_on_both_sides(
    tmp_path: Path, modules: dict[str, ModuleType], sizes: Any, chat_model: tuple[Path, Path]
) -> None:
    model, pairs = chat_model
    work = tmp_path / "work"
    workload = modules["peers.real"].make_real_work(work, model, pairs, 2, sizes, max_tokens=80)
    rows = [json.loads(line) for line in (work / "pairs.jsonl").read_text().splitlines()]
    assert len(rows) == 2 * sizes.rows  # of the 6 that can be used, repeated
    assert rows[0] == {"prompt": "<bos> user w0 w1 <eos> <bos> assistant", "chosen": " w2 w3", "rejected": " w4"}
    assert rows[6] == rows[0]
    assert (workload.prompt, workload.chosen, workload.rejected) == (7.0, 3.0, 2.0)
    assert workload.peer_pad is None  # <pad> is in no row
    replay = json.loads((work / "replay.json").read_text())
    assert len(replay) == sizes.ppo_prompts
    assert {len(completion) for completion in replay} == {sizes.new_tokens}
    assert all(token > 3 for completion in replay for token in completion), "no special tokens"
    classifier = importlib.import_module("safetensors.torch").load_file(work / "reward" / "model.safetensors")
    policy = importlib.import_module("safetensors.torch").load_file(work / "policy" / "model.safetensors")
    assert all(torch.equal(classifier[name], policy[name]) for name in policy)


def test_peer_pads_with_a_token_of_no_row_where_the_pad_token_is_eos(
    tmp_path: Path, modules: dict[str, ModuleType], sizes: Any, chat_model: tuple[Path, Path]
) -> None:
    model, pairs = chat_model
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(model)
    workload = modules["peers.real"].make_real_work(tmp_path / "work", model, pairs, 1, sizes)
    assert workload.peer_pad is not None
    text = (tmp_path / "work" / "pairs.jsonl").read_text()
    assert workload.peer_pad not in text.replace('"', " ").split()
    assert workload.peer_pad not in ("<eos>", "<bos>")


def test_a_gguf_file_is_known_by_its_name_or_its_folder(tmp_path: Path, modules: dict[str, ModuleType]) -> None:
    gguf_file = modules["peers.real"].gguf_file
    with pytest.raises(SystemExit, match=r"neither a config\.json nor one GGUF file"):
        gguf_file(tmp_path)
    (tmp_path / "a.gguf").touch()
    assert gguf_file(tmp_path) == gguf_file(tmp_path / "a.gguf") == (tmp_path, "a.gguf")
    (tmp_path / "b.gguf").touch()
    assert gguf_file(tmp_path / "b.gguf") == (tmp_path, "b.gguf")
    with pytest.raises(SystemExit, match="name the file itself"):
        gguf_file(tmp_path)
    (tmp_path / "config.json").touch()
    assert gguf_file(tmp_path) == (tmp_path, None)


@pytest.mark.slow
def test_a_gguf_model_becomes_an_ordinary_folder(
    tmp_path: Path, modules: dict[str, ModuleType], sizes: Any, shared: Path
) -> None:
    model, pairs = shared / "models" / "smollm2-135m-instruct", shared / "data" / "human_pairs" / "train.jsonl.gz"
    workload = modules["peers.real"].make_real_work(tmp_path, model, pairs, 1, sizes)
    assert workload.parameters == 134_515_008
    assert (workload.body, workload.head) == (106_168_320, 28_311_552)
    assert workload.peer_pad == "<|endoftext|>"
    prompt = json.loads((tmp_path / "prompts.jsonl").read_text().splitlines()[0])["prompt"]
    assert prompt.startswith("<|im_start|>system\n")
    assert prompt.endswith("<|im_start|>assistant\n")
    assert "quantization_config" not in (tmp_path / "policy" / "config.json").read_text()


@pytest.mark.beside
@pytest.mark.parametrize(
    ("script", "more"), [("side_by_side", ""), ("side_by_side", "--lora 2 --clock cpu"), ("floor", "")]
)
def test_scripts_run_on_a_model_folder(
    script: str,
    more: str,
    tmp_path: Path,
    modules: dict[str, ModuleType],
    chat_model: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, pairs = chat_model
    module, ours, out = modules[script], modules["peers.ours"], tmp_path / "figures.json"
    jobs = []

    def run_side(python: str, side: str, job: Any, folder: Path) -> dict[str, Any]:  # the peer does the same work
        jobs.append((side, job.trainer, job.peer))
        result: dict[str, Any] = ours.run(job, tmp_path / f"run{len(jobs)}")
        return result

    monkeypatch.setattr(module, "run_side", run_side)
    monkeypatch.setattr(modules["side_by_side"], "versions", lambda python: {"trl": "0"})
    monkeypatch.setattr(module, "measure", lambda *_, **__: modules["floor"].Rates(few=1e9, many=2e9, memory=1e9))
    sizes = "--rows 4 --prompts 2 --group 2 --ppo-prompts 16 --ppo-minibatches 2 --new-tokens 4 --max-tokens 80"
    length = "--steps 2 --threads 1 --trainers sft grpo"
    rest = {"side_by_side": "--peer-python python --rounds 1", "floor": ""}[script]
    where = ["--model", str(model), "--pairs", str(pairs), "--json", str(out)]
    module.main([*where, *sizes.split(), *rest.split(), *more.split(), *length.split()])
    figures, text = json.loads(out.read_text()), capsys.readouterr().out
    assert "tokens: 7 a prompt, 2 a completion of the data, at most 4" in text
    assert figures["about"]["size"] == "policy"
    if script == "floor":
        phases = [(row["trainer"], row["phase"]) for row in figures["rows"]]
        assert {("sft", "update"), ("grpo", "sample"), ("grpo", "update")} <= set(phases)
        return
    assert [(side, peer) for side, trainer, peer in jobs if trainer == "grpo"] == [
        ("ours.py", "defaults"),
        ("trl_side.py", "defaults"),
        ("trl_side.py", "memory"),
    ]
    assert figures["about"]["sizes"]["new_tokens"] == 4
    assert all(one["same_first_step"] for settings in figures["trainers"].values() for one in settings.values())
    assert "- grpo, memory: loss" in text
    assert text.count(": the same") == 4  # two trainers, each beside two settings of TRL


def test_an_exponent(modules: dict[str, ModuleType]) -> None:
    assert modules["scaling"].exponent([(1.0, 3.0), (2.0, 12.0), (4.0, 48.0)]) == pytest.approx(2.0)


@pytest.mark.slow
def test_gpu_benchmark_runs_on_a_cpu_at_toy_size(
    tmp_path: Path, modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "gpu.json"
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--toy", "--threads", "1", "--json", str(out)])
    modules["gpu"].main()
    results = json.loads(out.read_text())
    assert set(results) == {"about", "rollout", "update", "grpo", "ppo"}
    assert results["update"]["share"] > 0


def test_results_of_the_gpu_benchmark_are_a_table(modules: dict[str, ModuleType]) -> None:
    results = {"about": {"torch": "2"}, "decoding": {"recorded": {"first_s": 1.23456, "way": "a|b\nc"}}}
    assert modules["gpu"].as_markdown(results).splitlines()[2:] == [
        "| about | torch | 2 |",
        "| decoding | recorded first_s | 1.235 |",
        "| decoding | recorded way | a/b c |",
    ]


class StandInForVllm(ModuleType):
    """vLLM's part in benchmarks/recorded_decoding.py: completions of two and of three tokens."""

    __version__ = "0.0"

    def __init__(self) -> None:
        super().__init__("vllm")
        self.asked: list[tuple[Any, Any]] = []
        self.LLM, self.SamplingParams = self.load, SimpleNamespace

    def load(self, model: str, **settings: Any) -> Any:
        saved = AutoModelForCausalLM.from_pretrained(model)
        assert saved.dtype == torch.bfloat16
        assert settings == {"skip_tokenizer_init": True, "dtype": "bfloat16", "max_model_len": 6 + 12}
        return self

    def generate(self, prompts: Any, params: Any, *, use_tqdm: bool) -> Any:
        self.asked.append((prompts, params))
        completions = [SimpleNamespace(token_ids=[1, 2]), *[SimpleNamespace(token_ids=[1, 2, 3])] * (params.n - 1)]
        return [SimpleNamespace(outputs=completions) for _ in prompts]


def test_vllm_samples_the_same_prompts_to_the_same_ends_where_it_is_installed(
    monkeypatch: pytest.MonkeyPatch, modules: dict[str, ModuleType]
) -> None:
    stand_in = StandInForVllm()
    monkeypatch.setitem(sys.modules, "vllm", stand_in)
    decoding = importlib.import_module("recorded_decoding")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    result = decoding.vllm_rollouts(decoding.model_of("toy", "cpu"), rows=16, prompt=6, length=12, rounds=3)
    assert (result["way"], result["tokens"]) == ("vllm 0.0", 2 * (2 + 7 * 3))
    assert len(stand_in.asked) == 3
    prompts, params = stand_in.asked[-1]
    assert [row["prompt_token_ids"] for row in prompts] == decoding.prompt_ids(16, 6).tolist()
    assert (params.n, params.max_tokens, params.temperature, params.seed) == (8, 12, 1.0, 2)
    assert tuple(params.stop_token_ids) == decoding.ending_tokens(97, 12)
    options = SimpleNamespace(pretend=False)
    monkeypatch.setattr(modules["gpu"].importlib.util, "find_spec", lambda name: name == "vllm")
    assert modules["gpu"].processes(options)["decoding vllm 0.5b"][-2:] == ["--backends", "vllm"]
    monkeypatch.setattr(modules["gpu"].importlib.util, "find_spec", lambda name: None)
    assert "decoding vllm 0.5b" not in modules["gpu"].processes(options)


def test_a_part_of_the_gpu_benchmark_that_fails_is_a_result(modules: dict[str, ModuleType]) -> None:
    def fails() -> dict[str, Any]:
        raise RuntimeError("no such kernel")

    results: dict[str, Any] = {}
    modules["gpu"].attempt(results, "decoding", fails)
    modules["gpu"].attempt(results, "update", lambda: {"share": 0.5})
    assert results == {"decoding": {"failed": "RuntimeError: no such kernel"}, "update": {"share": 0.5}}


@pytest.mark.beside
@pytest.mark.parametrize("name", ["sampler", "forward"])
def test_ours_beside_the_plain_way(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module(name)
    rest = {"sampler": ["--lengths", "fixed", "--threads", "1"], "forward": ["--no-memory", "--case", "grpo"]}[name]
    out = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", [name, "--size", "toy", "--rounds", "1", "--json", str(out), *rest])
    module.main()
    assert "toy" in out.read_text()
    assert capsys.readouterr().out


def test_overoptimization_of_made_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy that is the gold has nothing to over-optimize; one that prizes texts hated by the gold has something."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("overoptimization")
    monkeypatch.setattr("overoptimization_laws.RESAMPLES", 100)
    gold = torch.randn(40, 16, generator=torch.Generator().manual_seed(0))
    results = module.best_of_n({"gold": gold, "good": gold * 2 + 1, "bad": -gold}, 0)
    assert results["good"]["n"] == [1, 2, 3, 4, 6, 8, 12, 16]
    assert results["good"]["curves"]["gold"] == pytest.approx(results["gold"]["curves"]["gold"])
    assert results["good"]["curves"]["gold"][-1] == pytest.approx(float(gold.amax(dim=1).mean()))
    assert results["bad"]["curves"]["gold"][-1] == pytest.approx(float(gold.amin(dim=1).mean()))
    assert results["good"]["fit"]["alpha"]["low"] > 0 > results["bad"]["fit"]["alpha"]["high"]
    ppo = {"rm": {"kl": [[0.0, 1.0, 4.0, 9.0]], "gold": [[0.0, 1.0, 1.5, 1.2]]}}
    module.draw({"best_of_n": results, "ppo": ppo}, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    sys.modules.pop("overoptimization")
