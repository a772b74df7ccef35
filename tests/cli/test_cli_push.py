"""rlhf push: the card has the numbers of the run, and model and card arrive at a stand-in of the hub in one commit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hub_stand_in import HubStandIn, hub_stand_in

from rlhf.cli import main
from rlhf.config.load import dump, train_config
from rlhf.report.page import write_report
from rlhf.tracking.run_folder import RunFolder
from rlhf.tracking.trackers import JsonlLogger

SETTINGS: dict[str, Any] = {
    "run": {"name": "tiny ppo", "seed": 7},
    "policy": {"model": "owner/base"},
    "reward": {"source": {"type": "function", "target": "/home/somebody/secret/rewards/words.py:score"}},
    "algorithm": {"preset": "ppo", "kl": {"controller": {"type": "adaptive", "target": 6.0}}},
    "schedule": {"steps": 20},
}
ROWS: list[dict[str, Any]] = [
    {"step": 0, "eval/score": 0.534, "eval/kl": 0.0, "eval/kl_se": 0.0},
    {"step": 20, "eval/score": 0.912, "eval/kl": 6.1, "eval/kl_se": 0.2, "score/mean": 0.9},
]
COMPARISON: dict[str, Any] = {
    "prompts": 256,
    "against": "start",
    "win_rate": {"value": 0.731, "low": 0.662, "high": 0.799},
    "length_controlled": None,
    "difference": {"value": 0.378, "low": 0.351, "high": 0.402},
    "pairwise": None,
}
SUITE = {
    "suite": "ifeval",
    "figures": {"prompts_strict": {"value": 0.226, "low": 0.192, "high": 0.263, "n": 541, "meaning": "all followed"}},
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run with an evaluation and a suite; its model is one small file."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"p{i}"}) + "\n" for i in range(13)))
    settings = {**SETTINGS, "data": {"prompts": {"path": str(prompts)}, "eval_prompts": {"path": "owner/questions"}}}
    folder = RunFolder(tmp_path / "run")
    folder.write_config(dump(train_config(settings)))
    with JsonlLogger(folder.metrics) as log:
        for row in ROWS:
            log.log(row)
    with JsonlLogger(folder.notes) as log:
        log.log({"step": 0, "text": "2 rows <b>skipped</b>"})
    (folder.path / "eval.json").write_text(json.dumps(COMPARISON))
    (folder.path / "evals").mkdir()
    (folder.path / "evals" / "ifeval.json").write_text(json.dumps(SUITE))
    (folder.path / "model").mkdir()
    (folder.path / "model" / "config.json").write_text('{"model_type": "llama"}')
    (folder.path / "model" / "model.safetensors").write_bytes(b"\x08weights")
    (folder.path / "model" / "README.md").write_text("a library's own card")
    return folder.path


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub may be reached, without a proxy, with a token."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("HF_TOKEN", "hf_right")


def pushed(hub: HubStandIn, run: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    """The exit code of `rlhf push` to a stand-in, which is found like another hub: by HF_ENDPOINT."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
    return main(["push", str(run), "owner/tiny", *options])


def printed_card(run: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["push", str(run), "owner/tiny", "--dry-run"]) == 0
    return capsys.readouterr().out


def test_the_card_has_the_numbers_of_the_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    card = printed_card(run, capsys)
    meta, body = yaml.safe_load(card.split("---\n")[1]), card.split("---\n", 2)[2]
    assert meta == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["rlhf", "ppo"],
        "base_model": "owner/base",
        "datasets": ["owner/questions"],
    }
    assert "| base model | `owner/base` |" in body
    assert "| reward | function `…/rewards/words.py:score` |" in body
    assert "| KL to the reference | 6.1 [5.71, 6.49] nats per sequence, target 6 |" in body
    assert "| steps | 20 |\n| seed | 7 |" in body
    assert "run/" not in body.split("## Data")[1].split("## Results")[0]
    assert "| data.eval_prompts | `owner/questions` | on the hub |" in body
    assert "/prompts.jsonl` | 13 |" in body
    assert "| `eval/score` | 0.53 | 0.91 | score |" in body
    assert "| win rate | 0.731 [0.662, 0.799] |" in body
    assert "| mean score difference | 0.378 [0.351, 0.402] |" in body
    assert "against its start, 256 held-out prompts" in body
    assert "| `prompts_strict` | 0.226 [0.192, 0.263] | 541 | all followed |" in body
    assert "- Noted by the run: 2 rows &lt;b>skipped&lt;/b>" in body
    assert "Held-out scores come from the reward that the model was trained on" in body


def test_the_card_says_how_to_do_it_again_and_nothing_of_the_machine(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    card = printed_card(run, capsys)
    config = RunFolder(run).read_config()
    assert "    rlhf train config.yaml\n" in card
    assert f"torch {config['versions']['torch']}" in card
    block = card.split("```yaml\n")[1].split("```")[0]
    again = train_config(yaml.safe_load(block))
    assert again.policy.model == "owner/base"
    assert again.run.seed == 7
    assert "somebody" not in card
    assert str(run.parent.parent) not in card


def test_notes_of_the_run_name_no_folder_of_the_machine(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with JsonlLogger(RunFolder(run).notes) as log:
        log.log({"step": 6, "text": "continuing from /home/somebody/runs/ppo/checkpoints/step-000006 (step 6 of 20)"})
        log.log({"step": 6, "text": "~/secret/of/somebody/rows.jsonl: 3 rows of 12 and/or more, see docs/data.md"})
        log.log({"step": 6, "text": "asked http://127.0.0.1:8000/v1/score twice"})
    card = printed_card(run, capsys)
    assert "- Noted by the run: continuing from …/checkpoints/step-000006 (step 6 of 20)" in card
    assert "- Noted by the run: …/somebody/rows.jsonl: 3 rows of 12 and/or more, see docs/data.md" in card
    assert "- Noted by the run: asked http://127.0.0.1:8000/v1/score twice" in card
    assert "secret" not in card


def test_the_card_is_of_the_best_checkpoint_where_that_is_the_model(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(run)
    config = folder.read_config()
    with JsonlLogger(folder.metrics) as log:
        log.truncate(0)
        log.log({**ROWS[0], "best/step": 0.0})
        log.log({"step": 10, "eval/score": 1.5, "eval/kl": 2.0, "eval/kl_se": 0.1, "best/step": 10.0})
        log.log({**ROWS[1], "best/step": 10.0})
    folder.config.write_text(yaml.safe_dump({**config, "checkpoint": {**config["checkpoint"], "best": {}}}))
    card = printed_card(run, capsys)
    assert "Mean held-out score went from 0.53 (before) to 1.50 (after) over 10 of the 20 planned steps." in card
    assert "| `eval/score` | 0.53 | 1.50 | score |" in card
    assert "| KL to the reference | 2 [1.8, 2.2] nats per sequence, target 6 |" in card
    assert "| steps | 10 of 20 |" in card
    assert "- It is the best checkpoint of the run, from step 10." in card
    assert "The run has" not in card
    folder.config.write_text(
        yaml.safe_dump({**config, "checkpoint": {**config["checkpoint"], "best": {"restore": False}}})
    )
    assert "| `eval/score` | 0.53 | 0.91 | score |" in printed_card(run, capsys)


def test_without_evaluations_the_card_says_that_they_are_missing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "eval.json").unlink()
    (run / "evals" / "ifeval.json").unlink()
    card = printed_card(run, capsys)
    assert "no comparison with the start model with intervals" in card
    assert "No benchmark was run on it" in card


@pytest.mark.usefixtures("online")
def test_model_and_card_arrive_in_one_commit(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    card = printed_card(run, capsys)
    with hub_stand_in() as hub:
        assert pushed(hub, run, monkeypatch, "--private") == 0
        assert f"{hub.url}/owner/tiny" in capsys.readouterr().out
        assert pushed(hub, run, monkeypatch) == 0  # the repository exists now
    first, _ = hub.created
    assert (first["organization"], first["name"], first["visibility"]) == ("owner", "tiny", "private")
    commit, again = hub.commits
    assert commit == again
    assert {name: data for name, data in commit.items() if name != "README.md"} == {
        "config.json": b'{"model_type": "llama"}',
        "model.safetensors": b"\x08weights",
    }
    assert commit["README.md"].decode() == card.removesuffix("\n")
    assert hub.cards[0] == card.removesuffix("\n")


@pytest.mark.usefixtures("online")
def test_a_hub_that_refuses_or_is_away_is_told_in_plain_words(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with hub_stand_in(token="hf_other") as hub:
        assert pushed(hub, run, monkeypatch) == 2
    assert "does not let you write to owner/tiny: log in with `hf auth login`" in capsys.readouterr().err
    assert hub.commits == []
    assert pushed(hub, run, monkeypatch) == 2
    assert "cannot be reached" in capsys.readouterr().err


def keep_best(run: Path, step: int) -> Path:
    """Keep a best checkpoint in a run folder, like a run."""
    folder = run / "best" / f"step-{step:06d}"
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model" / "model.safetensors").write_bytes(b"\x08best")
    (folder / "best.json").write_text(json.dumps({"step": step, "by": "score", "mean": 0.93, "rows": 128}))
    (folder / "config.yaml").write_text((run / "config.yaml").read_text())
    return folder


@pytest.mark.usefixtures("online")
def test_the_best_checkpoint_is_pushed_with_what_was_measured_up_to_it(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with JsonlLogger(RunFolder(run).metrics) as log:
        log.log({"step": 30, "eval/score": 0.4, "eval/kl": 50.0})
    assert main(["push", f"{run}@best", "owner/tiny", "--dry-run"]) == 2
    assert "has kept no best checkpoint" in capsys.readouterr().err
    keep_best(run, 20)
    with hub_stand_in() as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
        assert main(["push", f"{run}@best", "owner/tiny"]) == 0
    assert hub.commits[0]["model.safetensors"] == b"\x08best"
    card = hub.commits[0]["README.md"].decode()
    assert "| steps | 20 |" in card
    assert "| `eval/score` | 0.53 | 0.91 | score |" in card
    assert "from step 20, chosen by the best score of 128 held-out rows" in card
    assert "win rate" not in card  # eval.json of the run is its own model's


def test_a_run_without_a_model_or_a_wrong_name_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["push", str(run), "a/b/c", "--dry-run"]) == 2
    assert "'a/b/c' is no name of a repository; write owner/name" in capsys.readouterr().err
    (run / "model" / "config.json").unlink()
    assert main(["push", str(run), "owner/tiny", "--dry-run"]) == 2
    assert "has no model/ yet: it is written at the end of the run" in " ".join(capsys.readouterr().err.split())
    assert main(["push", str(run.parent), "owner/tiny"]) == 2
    assert "is not a run folder" in capsys.readouterr().err


@pytest.mark.usefixtures("online")
def test_nothing_is_uploaded_to_a_public_repository_that_should_be_private(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with hub_stand_in() as hub:
        assert pushed(hub, run, monkeypatch) == 0
        capsys.readouterr()
        assert pushed(hub, run, monkeypatch, "--private") == 2
        error = " ".join(capsys.readouterr().err.split())
        assert "--private: owner/tiny exists already and is public, so nothing was uploaded" in error
        assert f"{hub.url}/owner/tiny/settings" in error
    assert len(hub.commits) == 1


def test_the_card_tells_which_rows_were_held_out(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, prompts = RunFolder(run), run.parent / "prompts.jsonl"
    settings = {**SETTINGS, "data": {"prompts": {"path": str(prompts)}, "holdout": 0.25}}
    folder.write_config(dump(train_config(settings)))
    lines = [line for line in printed_card(run, capsys).splitlines() if "prompts.jsonl" in line]
    trained, held_out = (line.split("|")[1:] for line in lines if line.startswith("|"))
    assert [trained[0].strip(), trained[2].strip()] == [
        "data.prompts",
        "about 75% of 13 (part 0.25 to 1 by the prompt's hash)",
    ]
    assert held_out[0].strip() == "data.eval_prompts"
    assert held_out[2].strip().startswith("about 25% of 13 (part 0 to 0.25 by the prompt's hash)")


SECRETS: dict[str, Any] = {
    "api_key": "planted-key",
    "hf_token": "planted-token",
    "headers": {"Authorization": "Bearer planted-bearer"},
    "url": "https://planted-user:planted-word@host.example/score?token=planted-query&n=3",
}


def test_neither_the_card_nor_the_report_shows_a_secret(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = RunFolder(run)
    config = folder.read_config()
    config["reward"]["source"]["kwargs"] = SECRETS
    config["data"]["prompts"]["path"] = "https://planted-user:planted-word@host.example/rows.jsonl"
    folder.config.write_text(yaml.safe_dump(config))
    with JsonlLogger(folder.notes) as log:
        log.log({"step": 3, "text": "asked https://host.example/?token=planted-query, with api_key=planted-key"})
    (run / "eval.json").write_text(json.dumps({**COMPARISON, "against": "https://planted-user@host.example/x"}))
    card, page = printed_card(run, capsys), write_report(run).read_text()
    for text in (card, page):
        assert "planted" not in text
        assert "https://***@host.example/score?token=***&amp;n=3" in text.replace("?token=***&n", "?token=***&amp;n")
    assert "keys and passwords are replaced by ***" in card
    again = train_config(yaml.safe_load(card.split("```yaml\n")[1].split("```")[0]))
    assert again.run.seed == 7


def test_what_a_note_quotes_is_pushed_only_if_asked_for(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with JsonlLogger(RunFolder(run).notes) as log:
        for quoted in ("a private 'remark'", "another one", "it's"):
            log.log(
                {"step": 3, "text": f"scores are not finite; the first is nan, for the completion {quoted!r}; see docs"}
            )
    card = printed_card(run, capsys)
    assert "- Noted by the run: scores are not finite; the first is nan, for the completion …; see docs" in card
    assert not any(text in card for text in ("private", "remark", "another one", "it's"))
    assert main(["push", str(run), "owner/tiny", "--dry-run", "--quotes"]) == 0
    assert "another one" in capsys.readouterr().out
