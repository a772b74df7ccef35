"""The command line: right commands, and a user's mistakes (exit code 2, one plain message, no traceback)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from runs import make_model, ppo_tree, prompts_file, write_rows

from rlhf.cli import main
from rlhf.config.files import merge
from rlhf.tracking.run_folder import RunFolder

ROOT = Path(__file__).resolve().parents[2]


def write_config(path: Path, tree: dict[str, Any]) -> str:
    path.write_text(yaml.safe_dump(tree))
    return str(path)


def sft_tree(folder: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    make_model(folder / "model")
    return {
        "run": {"out_dir": str(folder / "sft"), "device": "cpu"},
        "data": {"sft": {"path": str(write_rows(folder / "sft.jsonl", rows))}},
        "policy": {"model": str(folder / "model"), "lr": 1e-2},
        "algorithm": {"preset": "sft"},
        "batch": {"prompts_per_step": 4},
        "schedule": {"steps": 3},
    }


GOOD_ROWS = [{"prompt": f"{color} one", "completion": " good"} for color in ("red", "blue")] * 4


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()  # the output of making the models
    assert main(list(arguments)) == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.out + captured.err
    assert captured.err.startswith("error: ")
    return captured.err


def test_sft_reward_model_ppo_eval_sample_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sft = write_config(tmp_path / "sft.yaml", sft_tree(tmp_path, GOOD_ROWS))
    assert main(["train", sft]) == 0
    pairs = [{"prompt": f"{c} one", "chosen": " good good", "rejected": " bad"} for c in ("red", "blue")] * 8
    data = str(write_rows(tmp_path / "pairs.jsonl", pairs))
    rm = {
        "run": {"out_dir": str(tmp_path / "rm"), "device": "cpu"},
        "data": {"preferences": {"path": data}, "eval_preferences": {"path": data}},
        "model": {"model": str(tmp_path / "sft"), "lr": 1e-2},
        "batch": {"prompts_per_step": 8},
        "schedule": {"steps": 10},
    }
    assert main(["rm", write_config(tmp_path / "rm.yaml", rm)]) == 0
    assert json.loads((tmp_path / "rm" / "report_card.json").read_text())["accuracy"] == 1.0
    ppo = merge(
        ppo_tree(tmp_path),
        {
            "policy": {"model": str(tmp_path / "sft")},
            "reward": {"source": {"type": "model", "path": str(tmp_path / "rm"), "target": None}},
            "critic": {"init": "reward"},
        },
    )
    del ppo["reward"]["source"]["target"]
    assert main(["train", write_config(tmp_path / "ppo.yaml", ppo), "schedule.steps=2"]) == 0
    run = str(tmp_path / "run")
    capsys.readouterr()
    assert main(["eval", run]) == 0
    results = json.loads((tmp_path / "run" / "eval.json").read_text())
    assert results["prompts"] == 20
    assert 0 <= results["win_rate"]["low"] <= results["win_rate"]["value"] <= results["win_rate"]["high"] <= 1
    assert "win rate over the reference" in capsys.readouterr().out
    assert main(["eval", str(tmp_path / "rm")]) == 0
    assert "bag of words" in (out := capsys.readouterr().out)
    assert "rows of" not in out
    assert main(["eval", str(tmp_path / "rm"), "data.eval_preferences.limit=3"]) == 0
    assert "3 of 16 rows of " in capsys.readouterr().out
    assert main(["sample", run, "--prompt", "red one", "--count", "2"]) == 0
    assert capsys.readouterr().out.count("→") == 2
    (tmp_path / "run" / "report.html").unlink()
    assert main(["report", run]) == 0
    assert (tmp_path / "run" / "report.html").stat().st_size > 1000


def test_config_prints_what_it_resolves_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_config(tmp_path / "ppo.yaml", ppo_tree(tmp_path))
    assert main(["config", file, "policy.lr=1e-6", "algorithm.kl.coef=0.3"]) == 0
    resolved = yaml.safe_load(capsys.readouterr().out)
    assert resolved["policy"]["lr"] == 1e-6
    assert resolved["algorithm"]["kl"]["coef"] == 0.3
    assert resolved["algorithm"]["advantage"]["gae_lambda"] == 1.0


def test_an_unread_section_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = sft_tree(tmp_path, GOOD_ROWS) | {"critic": {"lr": 1.0}}
    assert main(["train", write_config(tmp_path / "c.yaml", tree)]) == 0
    assert "warning: critic is set, but" in capsys.readouterr().out


def nan_reward(**_: Any) -> list[float]:
    return [float("nan")] * 16


def short_reward(**_: Any) -> list[float]:
    return [1.0]


def broken_reward(**_: Any) -> list[float]:
    raise KeyError("no such thing")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["policy.learning_rate=1"], "here it is called lr"),
        (["policy.model={tmp}/nowhere"], "nowhere"),
        (["data.prompts.path={tmp}/promts.jsonl"], "promts.jsonl"),
        (["data.prompts.path={tmp}/empty.jsonl", "data.eval_prompts=null"], "empty.jsonl"),
        (["data.prompts.max_prompt_tokens=1", "data.eval_prompts=null"], "no usable rows"),
        (["sampling.max_new_tokens=64"], "context"),
        (["reward.source.target=nowhere:f"], "nowhere"),
        (["reward.source.target={here}:nan_rewad"], "nan_reward"),
        (["reward.source.target={here}:nan_reward"], "nan"),
        (["reward.source.target={here}:short_reward"], "1"),
        (["reward.source.target={here}:broken_reward"], "no such thing"),
        (["policy.tokenizer={tmp}/other"], "do not belong together"),
        (["critic.init={tmp}/model"], "is not a reward model"),
        (["run.device=cuda"], "no GPU"),
    ],
)
def test_a_mistake_is_one_plain_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], expected: str
) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    tree = ppo_tree(tmp_path)
    big = make_model(tmp_path / "other")
    tokenizer = json.loads((big / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] |= {f"w{i}": 10 + i for i in range(40)}
    (big / "tokenizer.json").write_text(json.dumps(tokenizer))
    file = write_config(tmp_path / "c.yaml", tree)
    filled = [text.replace("{tmp}", str(tmp_path)).replace("{here}", __file__) for text in overrides]
    assert expected.lower() in error_of(capsys, "train", file, *filled).lower()


def test_a_missing_file_and_a_folder_that_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no configuration file" in error_of(capsys, "train", str(tmp_path / "none.yaml"))
    assert "not a run folder" in error_of(capsys, "eval", str(tmp_path))
    assert error_of(capsys, "report", str(tmp_path))
    assert error_of(capsys, "sample", str(tmp_path / "none"), "--prompt", "x")


def test_a_page_of_several_runs_replaces_no_other_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        folder = RunFolder(tmp_path / name)
        folder.write_config({"run": {"name": name}})
        folder.metrics.write_text('{"score/mean": 0.5, "step": 1}\n')
    thesis, page = tmp_path / "thesis.html", tmp_path / "page.html"
    thesis.write_text("<!DOCTYPE html>\n<html><p>years of work</p></html>\n")
    report = ["report", str(tmp_path / "a"), str(tmp_path / "b"), "--out"]
    message = " ".join(error_of(capsys, *report, str(thesis)).split())
    assert f"{thesis} is there already, and this command did not write it: name another file with --out" in message
    assert "years of work" in thesis.read_text()
    assert "is a folder: name the file to write" in error_of(capsys, *report, str(tmp_path / "a"))
    for old in (None, "of an earlier call"):  # which is rewritten, though its runs were others
        if old is not None:
            page.write_text(page.read_text().replace("<title>a and b</title>", f"<title>{old}</title>"))
        assert main([*report, str(page)]) == 0
        assert "<title>a and b</title>" in page.read_text()


def test_the_copy_of_a_comparison_does_not_work_on_the_original(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = {"name": "x", "base": str(tmp_path / "no.yaml"), "out_dir": str(tmp_path / "made"), "arms": {"ppo": {}}}
    tree |= {"budget": {"completions": 64}, "seeds": [0]}
    (tmp_path / "copy" / "start").mkdir(parents=True)
    write_config(tmp_path / "copy" / "compare.yaml", tree)
    assert f"is not the folder of its comparison, {tmp_path / 'made'}" in error_of(
        capsys, "compare", str(tmp_path / "copy")
    )
    assert not (tmp_path / "made").exists()
    # with another out_dir it is a comparison of its own, and other checks follow
    assert "no.yaml" in error_of(capsys, "compare", str(tmp_path / "copy"), f"out_dir={tmp_path / 'new'}")
    (tmp_path / "copy" / "start").rmdir()  # a file of the user's, in a folder of theirs, made nothing yet
    assert "no.yaml" in error_of(capsys, "compare", str(tmp_path / "copy"))


def test_resume_never_begins_again_and_keeps_the_old_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_config(tmp_path / "c.yaml", sft_tree(tmp_path, GOOD_ROWS))
    assert main(["train", file]) == 0
    before = (tmp_path / "sft" / "metrics.jsonl").read_bytes()
    assert main(["train", file, "checkpoint.resume=never"]) == 0
    assert "already complete" not in capsys.readouterr().out
    kept = [folder for folder in tmp_path.iterdir() if folder.name.startswith("sft.old-")]
    assert [(folder / "metrics.jsonl").read_bytes() for folder in kept] == [before]
    assert main(["train", file]) == 0
    assert "nothing to train" in capsys.readouterr().out


@pytest.mark.usefixtures("warm_start")
def test_the_process_exits_0_on_sigterm_and_the_same_command_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts_file(tmp_path)
    tree = ppo_tree(tmp_path, schedule={"steps": 60}, eval={"every": 0}, checkpoint={"every": 0})
    file = write_config(tmp_path / "c.yaml", tree)
    command = [sys.executable, "-m", "rlhf", "train", file]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and (not metrics.exists() or len(metrics.read_text().splitlines()) < 4):
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "the same command continues" in out
    assert "Traceback" not in err
    done = len(metrics.read_text().splitlines())
    assert done < 61
    assert main(["train", file, f"schedule.steps={done + 1}"]) == 0
    assert "continuing from" in capsys.readouterr().out
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert steps == list(range(done + 2))


@pytest.mark.usefixtures("warm_start")
def test_the_code_of_sigterm_before_the_first_step_is_in_the_tables(tmp_path: Path) -> None:
    reward = "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\ndef score(completions): return [0.0]\n"
    (tmp_path / "stops.py").write_text(reward)
    tree = ppo_tree(tmp_path, reward={"source": {"target": f"{tmp_path / 'stops.py'}:score"}})
    command = [sys.executable, "-m", "rlhf", "train", write_config(tmp_path / "c.yaml", tree)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGTERM, done.stderr  # a shell tells 128 + 15
    assert "Traceback" not in done.stderr
    for page in ("run_folder.md", "reliability.md"):
        assert "143" in (ROOT / "docs" / page).read_text()


def test_help_is_quick_and_imports_no_torch() -> None:
    code = (
        "import sys; from rlhf.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "rlhf quickstart" in done.stdout
    assert done.stdout.strip().endswith("False")
