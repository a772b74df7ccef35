"""A language model behind an endpoint: retries, kept answers, secrets kept out of files, and how answers are read."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chat_server import Reply, chat, serving
from tiny_models import EOS, completions_of, tokenizer

from rlhf.errors import ConfigError, RewardError
from rlhf.rewards.chat import ChatConfig, ChatModel, fill_template, read_template
from rlhf.rewards.openai import ChatReward, ChatSource, read_score

SECRET = "sk-very-secret"


def model(url: str, cache: Path, environment: dict[str, str] | None = None, **more: Any) -> ChatModel:
    given = {"retries": 3, **more}
    config = ChatConfig(base_url=url, model="judge-1", cache_dir=str(cache), **given)
    return ChatModel(config, environment or {}, section="eval.judge", backoff_s=0.01)


def echo(_: int, question: str) -> Reply:
    return f"you said {question}"


def test_a_question_is_asked_as_openai_has_it_and_answers_come_in_order(tmp_path: Path) -> None:
    with serving(echo) as server:
        answers = model(f"{server.url}/", tmp_path, {"KEY": SECRET}, api_key_env="KEY", request={"seed": 7}).ask(
            ["a", "b"]
        )
    assert answers == ["you said a", "you said b"]
    asked = {request["messages"][0]["content"]: request for request in server.requests}
    assert asked["a"] == {
        "model": "judge-1",
        "messages": [{"role": "user", "content": "a"}],
        "temperature": 0,
        "max_tokens": 512,
        "seed": 7,
    }
    assert set(server.paths) == {"/v1/chat/completions"}
    assert {headers["Authorization"] for headers in server.headers} == {f"Bearer {SECRET}"}


def test_a_key_of_ours_can_be_left_out(tmp_path: Path) -> None:
    with serving(echo) as server:
        model(server.url, tmp_path, request={"temperature": None}).ask(["a"])
    assert "temperature" not in server.requests[0]
    assert "Authorization" not in server.headers[0]


def test_nothing_is_asked_twice_not_even_by_another_run(tmp_path: Path) -> None:
    with serving(echo) as server:
        assert model(server.url, tmp_path).ask(["a", "a", "b"]) == ["you said a", "you said a", "you said b"]
        assert len(server.requests) == 2
        assert model(server.url, tmp_path).ask(["b", "a", "c"]) == ["you said b", "you said a", "you said c"]
        assert len(server.requests) == 3
        model(server.url, tmp_path, max_tokens=9).ask(["a"])  # another request
        assert len(server.requests) == 4


def test_what_was_answered_before_an_error_is_kept_and_the_rest_is_not_asked(tmp_path: Path) -> None:
    with serving(lambda n, question: echo(n, question) if n < 2 else (400, b"no")) as server:
        with pytest.raises(RewardError, match=r"the judge .* refused: HTTP 400"):
            model(server.url, tmp_path, concurrency=1).ask([f"q{i}" for i in range(20)])
        assert len(server.requests) < 20
    assert len(list(tmp_path.rglob("*.json"))) == 2


def test_a_cache_that_cannot_be_written_is_an_error_of_the_reward(tmp_path: Path) -> None:
    """A run saves itself after such an error."""
    (tmp_path / "full").write_text("")
    with serving(echo) as server, pytest.raises(RewardError, match=r"cannot be written into .*full.*set cache_dir"):
        model(server.url, tmp_path / "full").ask(["a"])


def test_a_damaged_file_is_asked_again(tmp_path: Path) -> None:
    with serving(echo) as server:
        model(server.url, tmp_path).ask(["a"])
        (kept,) = tmp_path.rglob("*.json")
        for damage in ("{", "[]", '{"answer": 3}'):
            kept.write_text(damage)
            assert model(server.url, tmp_path).ask(["a"]) == ["you said a"]
        assert len(server.requests) == 4


def test_429_and_500_are_tried_again_and_what_the_server_asks_for_is_waited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("rlhf.rewards.http.time.sleep", pauses.append)
    replies: list[Reply] = [(429, b"slow down", {"Retry-After": "2"}), (500, b""), (503, b"", {"Retry-After": "900"})]
    with serving(lambda n, question: replies[n] if n < 3 else echo(n, question)) as server:
        assert model(server.url, tmp_path).ask(["a"]) == ["you said a"]
    assert pauses == [2.0, pytest.approx(0.015, abs=0.005), 30.0]


def test_a_server_that_stays_busy_is_given_up(tmp_path: Path) -> None:
    with serving(lambda _n, _question: (429, b"slow down")) as server:
        with pytest.raises(RewardError, match=r"no answer in 4 tries .*429.*slow down"):
            model(server.url, tmp_path).ask(["a"])
        assert len(server.requests) == 4


def test_a_silent_server_is_given_up(tmp_path: Path) -> None:
    def slow(_: int, question: str) -> Reply:
        time.sleep(0.3)
        return question

    with serving(slow) as server, pytest.raises(RewardError, match=r"2 tries .*timeout 0.1 s"):
        model(server.url, tmp_path, timeout_s=0.1, retries=1).ask(["a"])


def test_so_many_at_a_time_and_no_more(tmp_path: Path) -> None:
    def slow(_: int, question: str) -> Reply:
        time.sleep(0.03)
        return question

    with serving(slow) as server:
        model(server.url, tmp_path, concurrency=3).ask([str(i) for i in range(12)])
    assert server.most == 3


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"choices": []}', b'{"choices": [{"message": {"content": 3}}]}'])
def test_an_answer_of_another_kind_is_named(body: bytes, tmp_path: Path) -> None:
    with (
        serving(lambda _n, _question: (200, body)) as server,
        pytest.raises(RewardError, match="as an OpenAI endpoint"),
    ):
        model(server.url, tmp_path).ask(["a"])
    assert not list(tmp_path.rglob("*.json"))


def test_an_answer_without_text_is_empty(tmp_path: Path) -> None:
    with serving(lambda _n, _question: None) as server:
        assert model(server.url, tmp_path).ask(["a"]) == [""]


def test_an_answer_without_text_is_asked_again_the_next_time(tmp_path: Path) -> None:
    with serving(lambda n, _question: "8" if n else " ") as server:
        assert model(server.url, tmp_path).ask(["a"]) == [" "]
        assert model(server.url, tmp_path).ask(["a"]) == ["8"]
        assert model(server.url, tmp_path).ask(["a"]) == ["8"]
        assert len(server.requests) == 2


def test_the_key_is_in_no_file_and_no_error(tmp_path: Path) -> None:
    with serving(lambda n, _q: (401, f"wrong key {SECRET}".encode()) if n else "fine") as server:
        judge = model(server.url, tmp_path, {"KEY": SECRET}, api_key_env="KEY", concurrency=1)
        judge.ask(["a"])
        with pytest.raises(RewardError, match=r"wrong key \*\*\*") as caught:
            judge.ask(["b"])
    assert SECRET not in str(caught.value)
    assert SECRET not in judge.config.model_dump_json()
    assert all(SECRET not in path.read_text() for path in tmp_path.rglob("*") if path.is_file())


def test_a_key_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"eval\.judge\.api_key_env: the environment variable KEY is not set"):
        model("http://127.0.0.1:1/v1", tmp_path, api_key_env="KEY")
    with pytest.raises(ConfigError, match=r"eval\.judge\.api_key_env: the environment variable KEY holds a line break"):
        model("http://127.0.0.1:1/v1", tmp_path, {"KEY": f"{SECRET}\n"}, api_key_env="KEY")


@pytest.mark.parametrize("url", ["127.0.0.1:1/v1", "ftp://host/v1", "http://user:word@host/v1", "http://token@host/v1"])
def test_only_plain_http_addresses(url: str, tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=r"eval\.judge\.base_url"):
        model(url, tmp_path)


def test_braces_in_a_completion_stay_as_they_are() -> None:
    assert fill_template("{prompt}: {a} or {b}", prompt="{a}", a="{b}{x}", b="two") == "{a}: {b}{x} or two"


def test_a_template_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_text("{prompt} {completion} {other}")
    assert read_template(str(path), "", ("prompt", "completion"), section="s") == "{prompt} {completion} {other}"
    with pytest.raises(ConfigError, match=r"s\.template: .*t\.txt has no \{a\} and no \{b\}"):
        read_template(str(path), "", ("prompt", "a", "b"), section="s")
    with pytest.raises(ConfigError, match=r"s\.template: no file"):
        read_template(str(tmp_path / "gone"), "", (), section="s")
    path.write_bytes("{a}: schön?".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"s\.template: .*t\.txt cannot be read: 'utf-8' codec"):
        read_template(str(path), "", ("a",), section="s")


# Scores


@pytest.mark.parametrize(
    "answer, score",
    [
        *[("7", 7.0), (" 7.5\n", 7.5), ("**8**", 8.0), ("8/10", 8.0), ("Score: 8 / 10.", 8.0), ("[[3]]", 3.0)],
        *[("It has 3 faults.\n\nScore: 6", 6.0), ("10", 10.0), ("1", 1.0)],
        *[
            ("I rate it 3 out of 10.", 3.0),
            ("Rating: 7 (out of 10)", 7.0),
            ("**3** Out of **10**", 3.0),
            ("2 of 10", 2.0),
        ],
        *[("a score of 8", 8.0), ("8 points out of 10", None), ("out of 10", None)],
        *[("", None), ("good", None), ("11", None), ("0", None), ("-3", None), ("7 of them are good", None)],
        *[("1,000", None), ("v1.2.3", None), ("Score: 6\nthank you", None)],
        *[("4/5", None), ("8 / 100", None), ("3 out of 5", None), ("8 (out of 100)", None), ("10.0/10.0", 10.0)],
    ],
)
def test_how_a_score_is_read(answer: str, score: float | None) -> None:
    assert read_score(answer, 1.0, 10.0) == score


def reward(url: str, cache: Path, **more: Any) -> ChatReward:
    config = ChatSource(base_url=url, model="judge-1", cache_dir=str(cache), **more)
    return ChatReward(config, tokenizer(), ChatModel(config, {}, section="source", backoff_s=0.01), section="source")


def test_scores_of_completions_with_one_that_cannot_be_read(tmp_path: Path) -> None:
    batch = completions_of([[5, 7], [4], [6]], [[3, 14, EOS], [15, 9], [EOS]])
    answers = {"t3 t14": "I say: 9", "t15 t9": "well"}
    with serving(lambda _n, question: next((a for c, a in answers.items() if c in question), "2")) as server:
        scores = reward(server.url, tmp_path)(batch)
    assert scores.values.tolist() == [9.0, 5.5, 2.0]
    assert scores.parts["unreadable"].tolist() == [0.0, 1.0, 0.0]
    (asked,) = (r["messages"][0]["content"] for r in server.requests if "t3 t14" in r["messages"][0]["content"])
    assert "t5 t7" in asked
    assert "from 1 (worst) to 10 (best)" in asked


def test_a_judge_reads_a_text_prompt_as_its_row_has_it(tmp_path: Path) -> None:
    row = {"prompt": "<u>hello<a>", "prompt_messages": [{"role": "user", "content": "hello"}]}
    with serving(lambda *_: "7") as server:
        reward(server.url, tmp_path)(replace(completions_of([[5]], [[3, EOS]]), references=(row,)))
        (question,) = (request["messages"][0]["content"] for request in server.requests)
    assert "hello" in question
    assert "<u>" not in question


def test_a_judge_of_which_nothing_can_be_read_is_refused(tmp_path: Path) -> None:
    batch = completions_of([[5]] * 4, [[3], [4], [6], [7]])
    with (
        serving(lambda _n, _question: "As a language model") as server,
        pytest.raises(RewardError, match=r"none of 4 answers of the judge judge-1 at .* is a number from 1 to 10"),
    ):
        reward(server.url, tmp_path)(batch)


def test_a_template_for_pairs_gives_no_scores(tmp_path: Path) -> None:
    (tmp_path / "pairs.txt").write_text("{prompt} {a} {b}")
    with pytest.raises(ConfigError, match=r"no \{completion\}: .*pairs are judged by `rlhf eval`"):
        reward("http://127.0.0.1:1/v1", tmp_path, template=str(tmp_path / "pairs.txt"))


def test_a_scale_has_two_ends() -> None:
    with pytest.raises(ValueError, match="high is 1: it must be above low, 1"):
        ChatSource(base_url="http://x/v1", model="m", low=1, high=1)


def test_the_body_of_the_helper_is_openais() -> None:
    assert chat("A") == b'{"choices": [{"message": {"role": "assistant", "content": "A"}}]}'


def test_answers_that_cannot_be_read_do_not_stop_a_judge_that_could_be(tmp_path: Path) -> None:
    batch = completions_of([[5]] * 4, [[3], [4], [6], [7]])
    answers = iter(["7"] * 4)
    with serving(lambda _n, _question: next(answers, "As a language model \ud83d")) as server:
        source = reward(server.url, tmp_path)
        assert source(batch).values.tolist() == [7.0] * 4
        other = completions_of([[5]] * 4, [[8], [9], [10], [11]])
        for _ in range(2):  # asked, and read from the cache, which holds half of a surrogate pair
            assert source(other).parts["unreadable"].tolist() == [1.0] * 4
