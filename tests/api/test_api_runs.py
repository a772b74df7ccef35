"""The Python interface: Python objects in, the same runs as the command line's out."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import linecache
import os
import signal
import threading
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import yaml
from datasets import Dataset, DatasetDict
from runs import colored_prompts, make_model, write_rows
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import rlhf
from rlhf.api import checks
from rlhf.api.inputs import Inputs
from rlhf.cli import main
from rlhf.config.data import DatasetConfig
from rlhf.config.load import load_run
from rlhf.data.files import load_rows
from rlhf.errors import CheckpointError, ConfigError, DataError, RewardError, UserError
from rlhf.user_code import _OBJECTS, load_function, source_of, target_of

SETTINGS: dict[str, Any] = {
    "sampling": {"completions_per_prompt": 4, "max_new_tokens": 6},
    "batch": {"prompts_per_step": 4},
    "schedule": {"steps": 3},
    "policy": {"lr": 1e-3},
}
PROMPTS = colored_prompts()
PAIRS = [{"prompt": prompt, "chosen": "good good", "rejected": "bad bad"} for prompt in PROMPTS]


def goodness(completions: list[str]) -> list[float]:
    return [float(text.count("good")) for text in completions]


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(make_model(tmp_path / "start"))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


def same_weights(a: Path, b: Path) -> bool:
    first, second = weights(a), weights(b)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_a_lambda_a_list_and_the_curve(model: str, tmp_path: Path) -> None:
    steps: list[tuple[int, Mapping[str, float]]] = []
    result = rlhf.train(
        model,
        "grpo",
        prompts=PROMPTS,
        eval_prompts=PROMPTS[:2],
        reward=lambda completions: [float(len(text)) for text in completions],
        judge=goodness,
        folder=tmp_path / "run",
        on_step=lambda step, metrics: steps.append((step, metrics)),
        quiet=True,
        **SETTINGS,
    )
    assert result.complete
    assert result.folder == tmp_path / "run"
    assert [step for step, _ in steps] == [0, 1, 2, 3] == list(result.metrics.index)  # 0: the first evaluation
    assert [metrics["score/mean"] for _, metrics in steps[1:]] == result.metrics["score/mean"].dropna().tolist()
    assert steps[0][1]["eval/score"] != steps[0][1]["eval/proxy"]  # the judge's, and the reward's
    assert result.report.is_file()
    assert "score" in result._repr_html_()
    texts = rlhf.sample(result, ["red one", "blue"], count=2, seed=3)
    assert [len(row) for row in texts] == [2, 2]
    assert texts == rlhf.sample(result.folder, ["red one", "blue"], count=2, seed=3)
    assert result.model.config.vocab_size == len(result.tokenizer)


def test_the_command_line_gives_the_same_weights_bit_for_bit(model: str, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(
        "def goodness(completions):\n    return [float(t.count('good')) for t in completions]\n"
    )
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": prompt} for prompt in PROMPTS])
    by_python = rlhf.train(
        model, "grpo", prompts=PROMPTS, reward=goodness, folder=tmp_path / "python", quiet=True, **SETTINGS
    )
    config = {
        "run": {"out_dir": str(tmp_path / "cli")},
        "algorithm": {"preset": "grpo"},
        "data": {"prompts": {"path": str(rows)}},
        "reward": {"source": {"type": "function", "target": f"{tmp_path / 'reward.py'}:goodness"}},
        **SETTINGS,
        "policy": {"model": model, "lr": 1e-3},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    assert main(["train", str(tmp_path / "run.yaml")]) == 0
    assert same_weights(by_python.folder, tmp_path / "cli")
    assert (by_python.folder / "metrics.jsonl").read_bytes() == (tmp_path / "cli" / "metrics.jsonl").read_bytes()
    other = rlhf.train(
        model,
        "grpo",
        prompts=PROMPTS,
        reward=goodness,
        folder=tmp_path / "other",
        quiet=True,
        **{**SETTINGS, "run": {"seed": 1}},
    )
    assert not same_weights(by_python.folder, other.folder)


def test_a_loaded_model_a_dataset_and_dotted_keys(model: str, tmp_path: Path) -> None:
    loaded, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    options = {"folder": tmp_path / "objects", "quiet": True, "schedule": {"steps": 2}}
    data = Dataset.from_list(PAIRS)
    by_objects = rlhf.train(loaded, "dpo", tokenizer=tokenizer, preferences=data, **options, **{"policy.lr": 1e-3})
    by_paths = rlhf.train(
        model,
        "dpo",
        preferences=str(write_rows(tmp_path / "pairs.jsonl", PAIRS)),
        **{**options, "folder": tmp_path / "paths"},
        policy={"lr": 1e-3},
    )
    assert same_weights(by_objects.folder, by_paths.folder)
    with pytest.raises(ConfigError, match="needs its tokenizer"):
        rlhf.train(loaded, "dpo", preferences=data, folder=tmp_path / "none")


def test_the_rate_follows_the_size_of_a_loaded_model_and_the_run_names_it(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rlhf.config.sections.SMALL_MODELS", (1e3, 3e8))
    loaded, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    call = {"tokenizer": tokenizer, "prompts": PROMPTS, "reward": goodness, **{**SETTINGS, "policy": {}}}
    rlhf.train(loaded, "ppo", folder=tmp_path / "unset", **call)
    settings = yaml.safe_load((tmp_path / "unset" / "config.yaml").read_text())
    assert (settings["policy"]["lr"], settings["critic"]["lr"]) == (2e-5, 1e-4)
    assert "policy.lr=2e-05: it is not set, and the model has" in capsys.readouterr().out
    rlhf.train(loaded, "ppo", folder=tmp_path / "set", lr=3e-6, **call)
    assert yaml.safe_load((tmp_path / "set" / "config.yaml").read_text())["policy"]["lr"] == 3e-6
    assert "it is not set" not in capsys.readouterr().out


def test_sft_then_a_reward_model_then_ppo_with_it(model: str, tmp_path: Path) -> None:
    start = rlhf.sft(
        model,
        ({"prompt": p, "completion": "good one"} for p in PROMPTS),
        folder=tmp_path / "sft",
        quiet=True,
        schedule={"steps": 2},
    )
    scorer = rlhf.reward_model(
        start.model_folder,
        PAIRS,
        eval_preferences=PAIRS[:8],
        folder=tmp_path / "rm",
        quiet=True,
        schedule={"steps": 4},
    )
    assert 0 <= scorer.report_card["accuracy"] <= 1
    assert rlhf.evaluate(scorer)["accuracy"] == pytest.approx(scorer.report_card["accuracy"])  # type: ignore[index]
    rewards = [scorer.folder, ((scorer.model, scorer.tokenizer), 0.5), (goodness, 2)]
    run = rlhf.train(
        start.model_folder,
        "ppo",
        prompts=PROMPTS,
        eval_prompts=PROMPTS[:4],
        reward=[str(reward) if isinstance(reward, Path) else reward for reward in rewards],
        folder=tmp_path / "ppo",
        quiet=True,
        **SETTINGS,
    )
    source = yaml.safe_load((run.folder / "config.yaml").read_text())["reward"]["source"]
    assert source["weights"] == [1.0, 0.5, 2.0]
    rows = [json.loads(line) for line in (run.folder / "samples.jsonl").read_text().splitlines()]
    samples = [row for row in rows if row["step"] == 3 and row["split"] == "eval"]
    assert len(samples) == 4
    for row in samples:
        first, loaded, good = (row["parts"][f"sources.{number}"] for number in range(3))
        assert loaded == pytest.approx(first, abs=1e-6)  # the same model, given as an object
        assert row["score"] == pytest.approx(1.5 * first + 2 * good, abs=1e-6)
    comparison = rlhf.evaluate(run)
    assert comparison.prompts == 4  # type: ignore[union-attr]


def test_a_second_call_is_a_new_run_and_resume_continues(model: str, tmp_path: Path) -> None:
    def train(**changes: Any) -> rlhf.RunResult:
        options = {"prompts": PROMPTS, "reward": goodness, "folder": tmp_path / "run", "quiet": True, **SETTINGS}
        return rlhf.train(model, "grpo", **{**options, **changes})

    first, second = train(), train()
    assert [first.folder.name, second.folder.name] == ["run", "run-2"]
    assert same_weights(first.folder, second.folder)
    third = train(folder=None, **{"run.out_dir": str(tmp_path / "run")})
    assert [third.folder.name, third.complete] == ["run-3", True]
    assert (tmp_path / "run-3" / "data" / "prompts.jsonl").is_file()  # all of a run is in one folder
    with pytest.raises(ConfigError, match=r"folder=.* and run\.out_dir=.* say the same"):
        train(run={"out_dir": "runs/x"})
    longer = train(resume=True, schedule={"steps": 5})
    assert longer.folder == first.folder
    assert list(longer.metrics.index) == [1, 2, 3, 4, 5]
    assert same_weights(longer.folder, train(folder=tmp_path / "five", schedule={"steps": 5}).folder)
    with pytest.raises(DataError, match="not the rows that the run in"):
        train(resume=True, prompts=PROMPTS[1:])
    with pytest.raises(ConfigError, match="holds no run"):
        train(resume=True, folder=tmp_path / "nowhere")


def test_a_stopped_ensemble_of_separate_reward_models_continues(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(name: str, **changes: Any) -> rlhf.RunResult:
        options = {"ensemble": {"size": 2, "backbone": "separate"}, "steps": 3, "lr": 1e-2, "folder": tmp_path / name}
        return rlhf.reward_model(model, PAIRS, batch={"prompts_per_step": 4}, **{**options, **changes})

    def stop(step: int, metrics: Mapping[str, float]) -> None:
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    whole = train("whole", quiet=True)
    stopped = train("parts", on_step=stop)
    assert not stopped.complete
    told = "".join(capsys.readouterr().out.split())
    assert f"thesamecallwithfolder='{tmp_path / 'parts'}'andresume=Truecontinues" in told
    again = train("parts", resume=True, quiet=True)
    assert (again.folder, again.complete) == (stopped.folder, True)
    for member in ("members/0", "members/1"):
        assert same_weights(whole.folder / member, again.folder / member)
    with pytest.raises(CheckpointError, match="an ensemble of separate reward models"):
        train("parts", resume=True, ensemble=1)


def test_an_ensemble_that_fails_keeps_the_members_that_were_trained(model: str, tmp_path: Path) -> None:
    def fail(step: int, metrics: Mapping[str, float]) -> None:
        if (tmp_path / "run" / "members" / "1").is_dir():
            raise KeyError("no such metric")

    with pytest.raises(KeyError):
        rlhf.reward_model(
            model,
            PAIRS,
            ensemble={"size": 2, "backbone": "separate"},
            steps=1,
            batch={"prompts_per_step": 4},
            folder=tmp_path / "run",
            on_step=fail,
            quiet=True,
        )
    assert (tmp_path / "run" / "members" / "0" / "model").is_dir()


def defined(code: str, name: str = "score") -> Any:
    """Return what a cell of a notebook defines; its source is known, as there."""
    cell = f"<cell {uuid.uuid4()}>"
    linecache.cache[cell] = (len(code), None, code.splitlines(keepends=True), cell)
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(code, cell, "exec"), space)
    return space[name]


CELL = "def score(completions):\n    return [float(len(text)) for text in completions]\n"


def test_a_function_defined_again_continues_its_run_and_another_one_does_not(model: str, tmp_path: Path) -> None:
    def train(reward: Any, steps: int, resume: Any = True) -> rlhf.RunResult:
        options = {"prompts": PROMPTS, "folder": tmp_path / "run", "quiet": True, **SETTINGS}
        return rlhf.train(model, "grpo", reward=reward, resume=resume, **{**options, "schedule": {"steps": steps}})

    train(defined(CELL), 1, False)
    assert list(train(defined(CELL), 2).metrics.index) == [1, 2]
    changed = defined(CELL.replace("float(", "1000.0 + float("))
    told = r"run \(step 2\): reward\.source\.target: the source that the run began with → another source\. "
    for steps in (2, 3):  # of a finished run too
        with pytest.raises(CheckpointError, match=told + r'.*resume="always"'):
            train(changed, steps)
    _OBJECTS.clear()  # as in a new process, where it has the name that the run's function had
    with pytest.raises(CheckpointError, match=told):
        train(changed, 3)
    assert train(changed, 3, "always").metrics["score/mean"].loc[3] > 1000
    assert train(changed, 4).complete
    config = tmp_path / "run" / "config.yaml"
    settings = yaml.safe_load(config.read_text())
    assert set(settings.pop("functions")) == {"reward.source.target"}
    settings["reward"]["source"]["target"] = "python:score"
    config.write_text(yaml.safe_dump(settings))  # as an earlier version left it
    _OBJECTS.clear()
    assert train(defined(CELL), 5).complete


METHOD = "class score:\n    def step(self):\n        return 1\n"


@pytest.mark.parametrize(
    "code, again, other",
    [
        ("score = lambda completions: [1.0]", "steps, score = 2, lambda completions: [1.0]", "score = lambda x: [1.0]"),
        ("score = [lambda: 1, lambda: 2][0]", "score = [lambda: 1, lambda: 3][0]", "score = [lambda: 3, lambda: 2][0]"),
        (METHOD, f"import os\n{METHOD}", METHOD.replace("1", "2")),
    ],
)
def test_the_source_of_a_function_is_its_own(code: str, again: str, other: str) -> None:
    """Not the call that a lambda stands in: its other arguments change when a run continues."""
    first, second, third = (source_of(target_of(defined(text))) for text in (code, again, other))
    assert first
    assert first == second != third


def test_the_numbers_that_a_function_keeps_are_of_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(weight: float, scorer: object) -> Any:
        return lambda completions: [weight, scorer]

    sources = [source_of(target_of(make(weight, object()))) for weight in (1.0, 1.0, 2.0)]
    assert sources[0] == sources[1] != sources[2]
    sources = [source_of(target_of(functools.partial(goodness, limit=limit))) for limit in (1, 1, 2)]
    assert sources[0] == sources[1] != sources[2]
    assert source_of(target_of(functools.partial(print))) == ""  # a built-in has no source
    assert source_of("file.py:score") is None
    file = tmp_path / "rewards_of_test.py"
    file.write_text(CELL)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("rewards_of_test")
    assert (target_of(module.score), source_of("rewards_of_test:score")) == ("rewards_of_test:score", CELL)
    file.write_text(CELL.replace("float(", "2 * float("))
    importlib.invalidate_caches()
    assert source_of(target_of(importlib.reload(module).score)) == file.read_text()


def test_another_run_in_the_folder_is_an_error_in_python_too(model: str, tmp_path: Path) -> None:
    def train(algorithm: str = "grpo", **changes: Any) -> rlhf.RunResult:
        options = {"prompts": PROMPTS, "reward": goodness, "folder": tmp_path / "run", "quiet": True, **SETTINGS}
        return rlhf.train(model, algorithm, **{**options, **changes})

    train()

    def files() -> dict[Path, bytes]:
        paths = (path for path in (tmp_path / "run").rglob("*") if path.is_file() and path.name != "notes.jsonl")
        return {path: path.read_bytes() for path in paths}

    before = files()
    with pytest.raises(UserError, match=r"algorithm\.preset: grpo → rloo.*folder=\.\.\..*resume=\"always\"") as error:
        train("rloo", resume=True, schedule={"steps": 5})
    assert "checkpoint.resume" not in str(error.value)
    assert "run.out_dir" not in str(error.value)
    again = train(resume=True)
    assert again.complete
    assert files() == before
    other = train("rloo", resume="always", schedule={"steps": 5})
    assert list(other.metrics.index) == [1, 2, 3, 4, 5]
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["algorithm"]["preset"] == "rloo"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "start"]


def test_failed_calls_leave_no_folder(model: str, tmp_path: Path) -> None:
    def fails(**changes: Any) -> None:
        options = {"prompts": PROMPTS, "reward": goodness, "folder": tmp_path / "run", "quiet": True, **SETTINGS}
        with pytest.raises(UserError):
            rlhf.train(model, "grpo", **{**options, **changes})

    def broken(completions: list[str]) -> list[float]:
        raise ValueError("no such thing")

    fails(prompts=[{"prompt": 3}])
    fails(reward=broken)
    fails(tokenizer=tmp_path / "none")
    assert [path.name for path in tmp_path.iterdir()] == ["start"]
    result = rlhf.train(
        model, "grpo", prompts=PROMPTS, reward=goodness, folder=tmp_path / "run", quiet=True, **SETTINGS
    )
    assert result.folder == tmp_path / "run"  # not run-5


def test_a_stopped_run_says_in_python_how_to_go_on(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = []

    def fails_later(completions: list[str]) -> list[float]:
        calls.append(1)
        if len(calls) > 1:
            raise ValueError("no such thing")
        return [0.0 for _ in completions]

    folder = tmp_path / "run"
    with pytest.raises(
        RewardError, match=r"saved at step 1: the same call with folder='.*run' and resume=True continues"
    ):
        rlhf.train(model, "grpo", prompts=PROMPTS, reward=fails_later, folder=folder, **SETTINGS)
    assert "command" not in capsys.readouterr().out
    assert folder.is_dir()  # a step was taken


def test_the_folder_of_a_call_is_named_after_what_trains(model: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    options = {"preferences": PAIRS, "quiet": True, "schedule": {"steps": 1}}
    assert rlhf.train(model, "dpo", **options).folder == Path("runs/dpo")
    assert rlhf.train(
        model, config="configs/dpo.yaml", algorithm="ipo", eval_preferences=PAIRS[:4], **options
    ).folder == (Path("runs/ipo"))
    assert rlhf.reward_model(model, PAIRS, quiet=True, schedule={"steps": 1}).folder == Path("runs/reward_model")


def test_a_run_in_a_thread_of_a_notebook(model: str, tmp_path: Path) -> None:
    results: list[rlhf.RunResult] = []

    def work() -> None:
        results.append(
            rlhf.train(model, "grpo", prompts=PROMPTS, reward=goodness, folder=tmp_path / "run", quiet=True, **SETTINGS)
        )

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert results[0].complete


@pytest.mark.parametrize(
    ("twice", "message"),
    [
        ({"lr": 1e-5, "policy": {"lr": 1e-4}}, r"lr and policy both set policy\.lr"),
        ({"policy": {"lr": 1e-4}, "policy.lr": 1e-5}, r"policy and policy\.lr both set policy\.lr"),
        ({"steps": 1, "schedule": {"steps": 2}}, r"steps and schedule both set schedule\.steps"),
        ({"seed": 1, "run.seed": 2}, r"seed and run\.seed both set run\.seed"),
        ({"lr": 1e-5, "learning_rate": 1e-4}, r"lr and learning_rate both set policy\.lr"),
    ],
)
def test_two_values_for_one_key_are_an_error(twice: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{message}: give one of them"):
        rlhf.train("model", "grpo", prompts=PROMPTS, reward=goodness, folder=tmp_path / "run", **twice)
    with pytest.raises(ConfigError, match=r"lr and model\.lr both set model\.lr"):
        rlhf.reward_model("model", PAIRS, folder=tmp_path / "run", lr=1e-5, **{"model.lr": 1e-4})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"on_step": 3}, "on_step is a int: give a function of the step and its metrics"),
        ({"loss": 3}, "loss is a int: give a function, or an instance of a class"),
        ({"advantage": "group"}, 'advantage is a str: .* algorithm={"advantage"'),
        ({"reward": [goodness, (goodness, "x")]}, r"reward: entry 2 of the list is no \(reward, weight\)"),
        ({"reward": [goodness, (goodness, 1, 2)]}, r"reward: entry 2 of the list is no \(reward, weight\)"),
        ({"model": None}, "model is missing: give a path"),
        ({"preset": None}, 'preset is missing: .*"grpo"'),
    ],
)
def test_an_argument_that_is_none_of_its_forms_is_named(wrong: dict[str, Any], message: str, tmp_path: Path) -> None:
    arguments = {"model": "model", "preset": "grpo", "reward": goodness, "prompts": PROMPTS, "folder": tmp_path / "run"}
    with pytest.raises(ConfigError, match=message):
        inspect.unwrap(rlhf.train)(**{**arguments, **wrong})
    assert not (tmp_path / "run").exists()


def test_a_model_that_is_missing_is_named_by_every_call(tmp_path: Path) -> None:
    missing: Any = None
    with pytest.raises(ConfigError, match="model is missing: give a path"):
        rlhf.sft(missing, ["good"], folder=tmp_path / "run")
    with pytest.raises(ConfigError, match="model is missing: give a path"):
        rlhf.reward_model(missing, PAIRS, folder=tmp_path / "run")
    with pytest.raises(ConfigError, match="model is a NoneType: give a run, a model folder or a hub id"):
        inspect.unwrap(rlhf.evaluate)(missing)
    with pytest.raises(ConfigError, match="against is a int: give a run, a model folder or a hub id"):
        inspect.unwrap(rlhf.evaluate)(str(tmp_path), against=5)  # type: ignore[arg-type]


def test_mistakes_are_told_before_anything_is_written(model: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(ConfigError, match=r"policy\.lrr"):
        rlhf.train(model, "grpo", prompts=PROMPTS, reward=goodness, folder=folder, policy={"lrr": 1})
    with pytest.raises(ConfigError, match="reward is a tuple"):
        rlhf.train(model, "grpo", prompts=PROMPTS, reward=("red", "blue"), folder=folder)
    with pytest.raises(ConfigError, match="model is a int"):
        rlhf.train(3, "grpo", prompts=PROMPTS, reward=goodness, folder=folder)
    assert not folder.exists()
    with pytest.raises(DataError, match="prompts: row 2 is a int: a row is a dictionary or a text"):
        rlhf.train(model, "grpo", prompts=iter(["red", 2]), reward=goodness, folder=folder)  # type: ignore[arg-type]
    conversations = iter([[{"role": "user", "content": "red"}]])
    with pytest.raises(DataError, match=r'a dictionary or a text; a conversation is \{"messages"'):
        rlhf.train(model, "grpo", prompts=conversations, reward=goodness, folder=folder)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"prompts: b has no weight: give every source as \(rows, weight\)"):
        rlhf.train(model, "grpo", prompts={"a": (PROMPTS, 3), "b": PROMPTS}, reward=goodness, folder=folder)
    with pytest.raises(DataError, match="preferences: row 1 is a str: a row is a dictionary"):
        rlhf.train(model, "dpo", preferences=["red"], folder=folder)
    with pytest.raises(DataError, match="row 1 cannot be written as JSON"):
        rlhf.train(model, "grpo", prompts=[{"prompt": "red", "tag": {1}}], reward=goodness, folder=folder)


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "there are no prompts: give at least one"),
        ("", {}, "prompt 1 is empty: give it a text to complete"),
        ("red", {"count": 0}, "count is 0: it has to be at least 1"),
        (
            "red " * 63,
            {"max_new_tokens": 2},
            "1 of 1 prompts leave no room for 2 new tokens",
        ),
    ],
)
def test_what_cannot_be_sampled_is_told(model: str, prompts: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        rlhf.sample(model, prompts, **options)


def test_a_prompt_that_is_no_text_is_told() -> None:
    unchecked = inspect.unwrap(checks._check_prompts)  # without the tests' own check of types
    with pytest.raises(DataError, match="prompt 2 is a NoneType: a prompt is a text"):
        unchecked(["red", None])


def test_a_run_with_a_lambda_is_not_for_another_process(model: str, tmp_path: Path) -> None:
    result = rlhf.train(
        model,
        "grpo",
        prompts=PROMPTS,
        reward=lambda completions: [0.0] * len(completions),
        folder=tmp_path,
        quiet=True,
        **SETTINGS,
    )
    target = yaml.safe_load((result.folder / "config.yaml").read_text())["reward"]["source"]["target"]
    del _OBJECTS[target]
    with pytest.raises(RewardError, match="is a Python object of the process that began this run"):
        load_function(target)


def test_own_functions_train_as_the_built_in_ones_do(model: str, tmp_path: Path) -> None:
    """A hand-written Dr. GRPO: the same weights as from the built-in parts."""

    def advantage(rewards: torch.Tensor, mask: torch.Tensor, group_size: int) -> torch.Tensor:
        scores = rewards.sum(1).view(-1, group_size)
        return (scores - scores.mean(1, keepdim=True)).flatten()[:, None] * mask

    def loss(
        logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        ratio = (logprobs - old_logprobs).exp()
        return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)

    assert rlhf.check(advantage).passed
    assert rlhf.check(loss).passed
    common = {"prompts": PROMPTS, "reward": goodness, "quiet": True, **SETTINGS}
    common["batch"] = {"prompts_per_step": 4, "minibatches": 2, "epochs": 2}
    kl = {"kl": {"placement": "none"}}
    ours = rlhf.train(
        model,
        kl,
        advantage=advantage,
        loss=loss,
        folder=tmp_path / "ours",
        **common,  # type: ignore[arg-type]
    )
    built_in = {**kl, "advantage": {"type": "group", "baseline": "centered"}, "policy_loss": {"type": "clip"}}
    theirs = rlhf.train(model, built_in, folder=tmp_path / "theirs", **common)  # type: ignore[arg-type]
    first, second = weights(ours.folder), weights(theirs.folder)
    assert all(torch.allclose(first[name], second[name], atol=1e-7) for name in first)
    with pytest.raises(ConfigError, match=r"the advantage .* returned a tensor of shape \[16\]"):
        rlhf.train(
            model,
            kl,
            advantage=lambda rewards, mask, group_size: rewards.sum(1),
            folder=tmp_path / "bad",
            **common,  # type: ignore[arg-type]
        )


def test_what_a_notebook_shows_of_an_interrupted_run(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "score/mean": 0.5}) + "\n")
    result = rlhf.RunResult(tmp_path, complete=False)
    assert "resume=True" in result._repr_html_()
    with pytest.raises(ConfigError, match="was interrupted"):
        _ = result.model_folder


@pytest.mark.parametrize(
    "rows, message",
    [
        (pd.DataFrame(PAIRS), r"sft is a DataFrame: give its rows, df\.to_dict\('records'\)"),
        (DatasetDict(train=Dataset.from_list(PAIRS)), r"sft is a DatasetDict: give one of its splits, sft\['train'\]"),
        (["good", "bad \ud800"], "sft: row 2 cannot be written as JSON"),
    ],
)
def test_rows_that_would_be_read_as_something_else_are_refused(
    model: str, rows: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=message):
        rlhf.sft(model, rows, folder=tmp_path / "run", quiet=True)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_dataset_gives_the_rows_that_it_gives_on_disk(streamed: bool, tmp_path: Path) -> None:
    """Arrow gives each tool call a null for every argument of the other rows' tools."""

    def row(arguments: dict[str, object]) -> dict[str, object]:
        return {"prompt": "a", "tool_calls": [{"name": "look", "arguments": arguments}], "note": None}

    rows = [row({"city": "Paris"}), row({"expr": "1+1"})]
    data = Dataset.from_list(rows)
    data.save_to_disk(tmp_path / "saved")
    inputs = Inputs(tmp_path)
    given = inputs.rows("prompts", data.to_iterable_dataset() if streamed else data, text="prompt")
    inputs.write()
    on_disk, written = (load_rows(DatasetConfig(path=str(path))) for path in (tmp_path / "saved", given["path"]))
    assert [row.values for row in written] == [row.values for row in on_disk] == rows


def test_the_rows_of_the_text_call_and_the_settings_of_their_section(model: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"steps": 1, "quiet": True}
    rows = ["good bad", "bad good"]
    both = rlhf.sft(model, rows, data={"holdout": None, "sft": {"learn": "all"}}, folder=tmp_path / "both", **options)
    section = load_run(both.folder).data
    assert section.holdout is None
    assert (section.sft.learn, Path(section.sft.path).parent) == ("all", both.folder / "data")
    by_name = rlhf.sft(model=model, data=rows, folder=tmp_path / "name", **options)
    mixed = rlhf.sft(model, data={"a": (rows, 1), "b": (rows, 2)}, folder=tmp_path / "mixed", **options)
    assert sorted(load_run(mixed.folder).data.sft.sources) == ["a", "b"]
    path = load_run(by_name.folder).data.sft.path
    alone = rlhf.sft(model, data={"sft": {"path": path}, "holdout": 0.5}, folder=tmp_path / "alone", **options)
    assert load_run(alone.folder).data.holdout == 0.5
    with pytest.raises(ConfigError, match="data"):
        rlhf.sft(model, rows, data=rows, folder=tmp_path / "twice", **options)


def test_an_empty_section_of_a_file_is_as_if_it_were_not_there(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sft.yaml").write_text("run:\nschedule: {steps: 1}\n")
    assert rlhf.sft(model, ["good bad"], config="sft.yaml", quiet=True).folder == Path("runs/sft")


def test_the_text_call_refuses_a_file_of_another_algorithm(model: str, tmp_path: Path) -> None:
    """It would train with PPO, and read none of the texts."""
    write_rows(tmp_path / "prompts.jsonl", [{"prompt": prompt} for prompt in PROMPTS])
    source = {"type": "function", "target": f"{__file__}:goodness"}
    ppo = {"algorithm": {"preset": "ppo"}, "reward": {"source": source}, **SETTINGS}
    file = tmp_path / "ppo.yaml"
    file.write_text(yaml.safe_dump({**ppo, "data": {"prompts": {"path": str(tmp_path / "prompts.jsonl")}}}))
    with pytest.raises(ConfigError, match=r"ppo\.yaml describes ppo, which learns from other data than texts"):
        rlhf.sft(model, ["good bad"], config=file, folder=tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_arguments_that_would_be_left_aside_are_refused(model: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="data and limit are a suite's"):
        rlhf.evaluate(model, data="rows.jsonl")
    with pytest.raises(ConfigError, match="completions and budget both limit the arms"):
        rlhf.compare(model, ["grpo"], reward="my.py:score", completions=10, budget={"tokens": 100.0})
    (tmp_path / "config.yaml").write_text(f"model: {{model: {model}}}\ndata: {{preferences: {{path: pairs.jsonl}}}}\n")
    with pytest.raises(ConfigError, match="is a reward model's run"):
        rlhf.evaluate(tmp_path, against=model)


@pytest.mark.usefixtures("nothing_stays_registered")
def test_a_run_samples_with_a_correction_of_its_plugin(model: str, tmp_path: Path) -> None:
    """The settings of a run are read also if nothing has imported its plug-ins yet."""
    (tmp_path / "own_correction.py").write_text(
        "from typing import Literal\n\nfrom rlhf.algorithms.correction import TokenTruncate\n\n\n"
        'class Own(TokenTruncate):\n    """Its own."""\n\n    type: Literal[\'own_of_test\'] = \'own_of_test\'\n'
    )
    (tmp_path / "config.yaml").write_text(
        f"policy: {{model: {model}}}\nplugins: [{tmp_path / 'own_correction.py'}]\n"
        "sampling: {correction: {type: own_of_test}, max_new_tokens: 3}\n"
    )
    options = checks.SampleOptions()
    sampling = checks.check_sampling(str(tmp_path), ["red"], options, max_new_tokens=None, temperature=None)
    assert (sampling.max_new_tokens, sampling.correction and sampling.correction.type) == (3, "own_of_test")


def test_a_cost_beside_the_reward(model: str, tmp_path: Path) -> None:
    result = rlhf.train(
        model,
        "ppo_lag",
        prompts=PROMPTS,
        reward=lambda completions: [float(len(text)) for text in completions],
        costs=goodness,
        algorithm={"lagrange": {"cost_limit": -1.0, "lookahead": 0.0}},
        folder=tmp_path / "run",
        quiet=True,
        **SETTINGS,
    )
    multipliers = result.metrics["lagrange/multiplier"].dropna().tolist()
    assert multipliers == sorted(multipliers)
    assert multipliers[-1] > 1.0  # the cost is never below -1


def test_what_there_is_of_a_run_without_a_logged_step(tmp_path: Path) -> None:
    result = rlhf.RunResult(tmp_path, complete=False)
    assert result.metrics.empty
    assert "resume=True" in result._repr_html_()


def test_a_reward_model_s_adapter_is_read_and_an_ensemble_names_its_members(model: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"steps": 1, "batch": {"prompts_per_step": 4}, "quiet": True}
    settings |= {"lr": 1e-2, "model.lora": {"r": 2}}
    adapted = rlhf.reward_model(model, PAIRS, folder=tmp_path / "adapter", **{**settings, "model.export": "adapter"})
    whole = rlhf.reward_model(model, PAIRS, folder=tmp_path / "merged", **settings)
    ids = adapted.tokenizer(["red good"], return_tensors="pt").input_ids
    torch.testing.assert_close(adapted.model(ids).logits, whole.model(ids).logits)
    several = rlhf.reward_model(
        model, PAIRS, folder=tmp_path / "several", ensemble={"size": 2, "backbone": "separate"}, **settings
    )
    with pytest.raises(ConfigError, match=r"is an ensemble: its models are in .*members/0 and the folders beside it"):
        _ = several.model
    assert several._repr_html_()
