"""A reward model behind an address: the scores of the model in this process, limits, refusals, an orderly end."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rm_cases import made_model
from runs import online, ppo_tree, write_rows
from tiny_models import EOS, completions_of, ragged, tokenizer

from reward_model.server import TextScorer, TokenRow, parse_request
from reward_model.source import RewardModelSource
from rlhf.cli import main
from rlhf.config.data import ChatFormat
from rlhf.config.files import merge
from rlhf.data.tokenizer import vocabulary_digest
from rlhf.errors import ConfigError, DataError, NonFiniteScores, RewardError
from rlhf.factory.rewards import build_source
from rlhf.models.folders import write_members
from rlhf.rewards.remote import RemoteReward, RemoteSource
from rlhf.rewards.source import MainRankReward
from rlhf.runtime.engine import Engine
from rlhf.training.online import train

uvicorn = pytest.importorskip("uvicorn")
service = pytest.importorskip("reward_model.server")

LIMIT = 20_000


class Served:
    """The application in a thread, on a port of its own."""

    def __init__(self, scorer: TextScorer, *, token: str | None = None, limit: int = LIMIT) -> None:
        self.app = service.make_app(scorer, name="rm", max_request_bytes=limit, token=token)
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/score"
        self.server = uvicorn.Server(uvicorn.Config(self.app, log_level="critical", access_log=False))
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.socket]})
        self.thread.start()

    def ask(
        self, body: bytes | Any, *, path: str = "/score", method: str = "POST", **headers: str
    ) -> tuple[int, dict[str, Any]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        sent = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method, path, sent, headers)
        answer = connection.getresponse()
        status, content = answer.status, json.loads(answer.read())
        connection.close()
        return status, content

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join()
        self.socket.close()


@pytest.fixture
def scorer(tmp_path: Path) -> TextScorer:
    model = made_model(tmp_path)
    model.calibrate(0.3, 2.0)
    return TextScorer(model, tokenizer(), max_batch=4, dtype="float64")


@pytest.fixture
def served(scorer: TextScorer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    one = Served(scorer)
    yield one
    one.close()


def remote(url: str, **more: Any) -> RemoteReward:
    settings = {"vocabulary": vocabulary_digest(tokenizer()), "retries": 0, **more}
    return RemoteReward(url, tokenizer(), **settings)


def in_process(scorer: TextScorer) -> RewardModelSource:
    return RewardModelSource(
        scorer.model, tokenizer(), policy_tokenizer=tokenizer(), micro_batch_size=4, dtype="float64"
    )


def test_by_tokens_the_scores_are_those_of_the_model_in_this_process(served: Served, scorer: TextScorer) -> None:
    batch = ragged(fill=17)  # some rows end with EOS, some do not
    torch.testing.assert_close(remote(served.url)(batch).values, in_process(scorer)(batch).values, rtol=0, atol=1e-6)


def test_by_texts_they_are_those_of_the_texts_encoded(served: Served, scorer: TextScorer) -> None:
    batch = completions_of([[5, 7], [4]], [[3, 14, EOS], [15, 9, EOS]])
    by_text = remote(served.url, vocabulary=None)(batch).values
    torch.testing.assert_close(by_text, in_process(scorer)(batch).values, rtol=0, atol=1e-6)
    foreign = remote(served.url, vocabulary="of another tokenizer")(batch).values
    torch.testing.assert_close(foreign, by_text, rtol=0, atol=1e-6)


def test_a_completion_that_did_not_finish_is_scored_without_eos(served: Served, scorer: TextScorer) -> None:
    batch = completions_of([[5, 7]], [[3, 14]])
    expected = in_process(scorer)(batch).values
    torch.testing.assert_close(remote(served.url, vocabulary="other")(batch).values, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("vocabulary", [vocabulary_digest(tokenizer()), None])
def test_texts_beyond_the_context_are_counted(served: Served, scorer: TextScorer, vocabulary: str | None) -> None:
    assert scorer.context == 64
    long, short = completions_of([[5] * 60], [[3] * 6 + [EOS]]), completions_of([[5, 7]], [[3, EOS]])
    answers = [remote(served.url, vocabulary=vocabulary)(batch) for batch in (long, short)]
    assert [answer.parts["cut"].tolist() for answer in answers] == [[1.0], [0.0]]
    local = [in_process(scorer)(batch) for batch in (long, short)]
    assert [answer.parts for answer in answers] == [answer.parts for answer in local]
    torch.testing.assert_close(answers[0].values, local[0].values, rtol=0, atol=1e-6)


def test_many_at_once_are_scored_together_and_each_gets_its_own(served: Served, scorer: TextScorer) -> None:
    batch = completions_of([[5, 7], [4], [6, 6]], [[3, 14, EOS], [15, 9, EOS], [8, EOS]])
    rows = [batch.rows(slice(i, i + 1)) for i in range(3)] * 8
    expected = in_process(scorer)(batch).values
    slow = scorer.scores

    def wait(given: list[TokenRow]) -> list[float | None]:
        time.sleep(0.05)
        return slow(given)

    served.app.state.batcher.score = wait
    with ThreadPoolExecutor(24) as pool:
        scores = list(pool.map(lambda row: remote(served.url)(row).values.item(), rows))
    assert scores == pytest.approx(expected.tolist() * 8, abs=1e-6)
    assert 6 <= served.app.state.batcher.batches < 24


@pytest.mark.parametrize(
    "body, status, message",
    [
        (b"", 400, "not JSON"),
        (b"{", 400, "not JSON"),
        (b"\xff\xfe", 400, "not JSON"),
        (b"[" * 5000, 400, "not JSON"),
        (b'{"prompts": [NaN]}', 400, "NaN is not JSON"),
        (b'{"n": ' + b"9" * 5000 + b"}", 400, "not JSON"),
        ([], 422, "found a list"),
        (None, 422, "found null"),
        ({}, 422, "prompts must be a list of strings; it is missing"),
        ({"prompts": ["a"]}, 422, "completions must be a list of strings; it is missing"),
        ({"prompts": "a", "completions": "b"}, 422, "prompts must be a list of strings"),
        ({"prompts": ["t3"], "completions": ["t4", "t5"]}, 422, "1 prompts but 2 completions"),
        ({"prompts": ["t3"], "completions": [4]}, 422, "completions must be a list of strings"),
        ({"prompts": ["t3"], "completions": ["t4"], "finished": [1]}, 422, "finished must be"),
        ({"prompts": ["\ud800"], "completions": ["t4"]}, 422, "prompts[0] is not Unicode"),
        ({"prompts": ["t3"], "completions": [""], "finished": [False]}, 422, "row 0: the completion is empty"),
        ({"prompts": ["t3"], "completions": ["t4"], "tokens": []}, 422, "tokens must be an object"),
        (
            {"prompts": ["t3"], "completions": ["t4"], "tokens": {"vocabulary": "x", "prompts": [[3]]}},
            422,
            "tokens.completions must be a list of 1 lists",
        ),
        (
            {"prompts": ["t3"], "completions": ["t4"], "references": [{"prompt_messages": [1, {"role": "user"}]}]},
            422,
            "references[0].prompt_messages is not a list of messages",
        ),
    ],
)
def test_a_bad_request_is_a_4xx_that_says_why(served: Served, body: Any, status: int, message: str) -> None:
    actual, content = served.ask(body)
    assert (actual, list(content)) == (status, ["error"])
    assert message in content["error"]
    assert served.ask({"prompts": ["t3"], "completions": ["t4"]})[0] == 200  # and the server is well


def test_a_conversation_that_the_template_refuses_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any other status would be asked for again, for two minutes."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    own = tokenizer()
    own.chat_template = "{{ raise_exception('no system prompts') }}"
    messages = [{"role": "system", "content": "t5"}, {"role": "user", "content": "t5"}]
    asked = {"prompts": ["t5"], "completions": ["t4"], "references": [{"prompt_messages": messages}]}
    with closing(Served(TextScorer(made_model(tmp_path), own, max_batch=4))) as served:
        status, content = served.ask(asked)
    assert (status, list(content)) == (422, ["error"])
    assert "no system prompts (the reward model's template)" in content["error"]


def test_conversations_are_read_in_every_form_that_data_have(tmp_path: Path) -> None:
    own = tokenizer()
    own.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"
    scorer = TextScorer(made_model(tmp_path), own, max_batch=4, chat=ChatFormat(system="t9"))

    def rows(turns: Any) -> Any:
        body = {"prompts": ["t5"], "completions": ["t4"], "references": [{"prompt_messages": turns}]}
        return scorer.rows(parse_request(body))[0]

    turn = {"role": "user", "content": "t5"}
    assert rows([turn]) == rows(turn) == rows([{"from": "human", "value": "t5"}])


def test_token_ids_out_of_range_are_refused(served: Served, scorer: TextScorer) -> None:
    for bad in (-1, 10_000, 10**30):
        tokens = {"vocabulary": scorer.vocabulary, "prompts": [[3]], "completions": [[bad]]}
        status, content = served.ask({"prompts": ["t3"], "completions": ["t4"], "tokens": tokens})
        assert (status, "not in the vocabulary" in content["error"]) == (422, True)


def test_no_rows_are_no_scores(served: Served) -> None:
    assert served.ask({"prompts": [], "completions": []}) == (200, {"scores": [], "parts": {"cut": []}})


def test_a_request_that_is_too_large_is_refused(served: Served) -> None:
    status, content = served.ask({"prompts": ["t3 " * LIMIT], "completions": ["t4"]})
    assert (status, content) == (
        413,
        {"error": f"the request is larger than {LIMIT} bytes: score fewer completions at a time"},
    )
    batch = replace(completions_of([[5]], [[3, EOS]]), references=({"long": "x" * 2 * LIMIT},))
    with pytest.raises(RewardError, match=r"413 .*larger than"):
        remote(served.url)(batch)


def test_other_paths_and_methods(served: Served, scorer: TextScorer) -> None:
    assert served.ask(b"", path="/health", method="GET") == (
        200,
        {"status": "ok", "model": "rm", "vocabulary": scorer.vocabulary},
    )
    assert served.ask(b"", path="/docs", method="GET")[0] == 404
    assert served.ask(b"", method="GET")[0] == 405


def test_the_token_is_asked_for_and_never_said(
    scorer: TextScorer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    served = Served(scorer, token="opensesame")
    good = {"prompts": ["t3"], "completions": ["t4"]}
    answers = [
        served.ask(good),
        served.ask(good, Authorization="Bearer opensesam"),
        served.ask(good, Authorization="Basic opensesame"),
        served.ask(b"", path="/health", method="GET"),
        served.ask(good, Authorization="Bearer opensesame"),
    ]
    assert [status for status, _ in answers] == [401, 401, 401, 200, 200]
    batch = completions_of([[5]], [[3, EOS]])
    assert remote(served.url, secret="opensesame")(batch).values.shape == (1,)
    with pytest.raises(RewardError, match="401") as caught:
        remote(served.url, secret="wrongsesame")(batch)
    served.close()
    written = capfd.readouterr()
    assert "sesame" not in written.out + written.err + json.dumps(answers) + str(caught.value)


def test_a_score_that_is_nan_is_an_odd_completion(served: Served, scorer: TextScorer) -> None:
    with torch.no_grad():
        scorer.model.head.weight.fill_(float("nan"))
    assert served.ask({"prompts": ["t3"], "completions": ["t4"]}) == (
        200,
        {"scores": [None], "parts": {"cut": [0.0]}},
    )
    with pytest.raises(NonFiniteScores, match="for the completion"):
        remote(served.url)(completions_of([[5]], [[3, EOS]]))


def test_the_token_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    config = RemoteSource(url="http://127.0.0.1:1/score", token_env="RM_TOKEN", send_tokens=True)
    monkeypatch.delenv("RM_TOKEN", raising=False)
    with pytest.raises(ConfigError, match=r"token_env: the environment variable RM_TOKEN is not set"):
        build_source(config, tokenizer(), Engine(torch.device("cpu")))
    for token in ("opensesame\n", "öpensesame"):  # no header can hold it
        monkeypatch.setenv("RM_TOKEN", token)
        with pytest.raises(ConfigError, match=r"token_env: the environment variable RM_TOKEN holds") as caught:
            build_source(config, tokenizer(), Engine(torch.device("cpu")))
        assert "pensesame" not in str(caught.value)
    monkeypatch.setenv("RM_TOKEN", "opensesame")
    source = build_source(config, tokenizer(), Engine(torch.device("cpu")))
    assert isinstance(source, MainRankReward)
    assert isinstance(source.source, RemoteReward)
    assert (source.source.poster.secret, source.source.vocabulary) == ("opensesame", vocabulary_digest(tokenizer()))


def test_a_question_is_read_or_refused() -> None:
    assert parse_request({"prompts": ["a"], "completions": ["b"]}).finished == [True]
    with pytest.raises(DataError, match="a list of 1 booleans"):
        parse_request({"prompts": ["a"], "completions": ["b"], "finished": []})


def test_a_mistake_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made_model(tmp_path / "backbone").save(tokenizer(), tmp_path / "rm")
    rm = str(tmp_path / "rm")
    for arguments, message in (
        ([str(tmp_path / "none")], "none"),
        ([rm, "--host", "192.0.2.1"], "cannot listen on 192.0.2.1"),
        ([rm, "--port", "99999"], "between 0 and 65535"),
        ([rm, "--max-batch", "0"], "--max-batch must be at least 1"),
        ([rm, "--token-env", "NO_SUCH_VARIABLE"], "NO_SUCH_VARIABLE"),
    ):
        assert main(["serve-reward", *arguments]) == 2
        output = capsys.readouterr()
        assert message in output.err
        assert "Traceback" not in output.out + output.err


@pytest.mark.slow
def test_ppo_against_the_served_model_is_ppo_against_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way: rlhf rm, rlhf serve-reward, PPO by both; SIGTERM ends the server in order."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("RM_TOKEN", "opensesame")
    tree = ppo_tree(tmp_path, schedule={"steps": 2}, eval={"every": 0}, data={"eval_prompts": None})
    pairs = [{"prompt": f"{c} one", "chosen": " good good", "rejected": " bad"} for c in ("red", "blue")] * 8
    rm = {
        "run": {"out_dir": str(tmp_path / "rm"), "device": "cpu"},
        "data": {"preferences": {"path": str(write_rows(tmp_path / "pairs.jsonl", pairs))}},
        "model": {"model": str(tmp_path / "model"), "lr": 1e-2},
        "batch": {"prompts_per_step": 8},
        "schedule": {"steps": 3},
    }
    (tmp_path / "rm.yaml").write_text(yaml.safe_dump(rm))
    assert main(["rm", str(tmp_path / "rm.yaml")]) == 0
    command = [sys.executable, "-m", "rlhf", "serve-reward", str(tmp_path / "rm"), "--port", "0"]
    process = subprocess.Popen(
        [*command, "--token-env", "RM_TOKEN"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "500"},
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert "/score" in line, process.communicate()
    url = next(word for word in line.split() if word.startswith("http"))

    def scores(name: str, source: dict[str, Any]) -> list[dict[str, Any]]:
        changed = merge(tree, {"run": {"out_dir": str(tmp_path / name)}, "logging": {"samples": 16}})
        changed["reward"] = {"source": source}
        run = online(changed)
        train(run)
        run.session.recorder.close()
        return run.session.recorder.folder.read_samples()

    here = scores("here", {"type": "model", "path": str(tmp_path / "rm")})
    there = scores("there", {"type": "remote", "url": url, "send_tokens": True, "token_env": "RM_TOKEN"})
    assert len(here) == 32
    assert [row["completion"] for row in here] == [row["completion"] for row in there]
    assert [row["score"] for row in there] == pytest.approx([row["score"] for row in here], abs=1e-6)
    assert "opensesame" not in (tmp_path / "there" / "config.yaml").read_text()
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert out.strip().endswith("stopped")
    assert "opensesame" not in out + err


def test_separate_members_are_served_one_by_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "members" / "0").mkdir(parents=True)
    write_members(tmp_path, ["members/0"])
    assert main(["serve-reward", str(tmp_path)]) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert f"is an ensemble of separate reward models: serve one of them, {tmp_path}/members/0" in message
