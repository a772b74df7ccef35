"""A reward server that is well, slow, broken for a moment, wrong, or not there."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from tiny_models import EOS, completions_of, tokenizer

from rlhf.errors import RewardError
from rlhf.rewards.remote import RemoteReward
from rlhf.types import Completions

Answer = Callable[[int, dict[str, Any]], tuple[int, bytes]]


class Server:
    """Answers each POST by `answer(n, request)`, n counting from 0."""

    def __init__(self, answer: Answer) -> None:
        self.requests: list[dict[str, Any]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.requests.append(asked)
                status, body = answer(len(outer.requests) - 1, asked)
                try:
                    self.send_response(status)
                    self.end_headers()
                    self.wfile.write(body)
                except OSError:  # the client has given up on a slow answer
                    pass

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/score"
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Answer], Server]]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    servers: list[Server] = []

    def start(answer: Answer) -> Server:
        servers.append(Server(answer))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def two() -> Completions:
    batch = completions_of([[5, 7], [4]], [[3, 14, EOS], [15, 9]])
    return replace(batch, references=({"answer": "a"}, {"answer": "b", "prompt": "asked"}))


def good(_: int, asked: dict[str, Any]) -> tuple[int, bytes]:
    return 200, json.dumps({"scores": [len(text.split()) for text in asked["completions"]]}).encode()


def reward(server: Server, **more: float) -> RemoteReward:
    return RemoteReward(server.url, tokenizer(), **{"retries": 3, "backoff_s": 0.01, **more})  # type: ignore[arg-type]


def test_the_server_gets_texts_and_gives_scores_and_parts(serve: Callable[[Answer], Server]) -> None:
    server = serve(lambda _n, _asked: (200, b'{"scores": [1, 2.5], "parts": {"fit": [0, -1]}}'))
    scores = reward(server)(two())
    assert scores.values.tolist() == [1.0, 2.5]
    assert {name: part.tolist() for name, part in scores.parts.items()} == {"fit": [0.0, -1.0]}
    assert server.requests == [
        {
            "prompts": ["t5 t7", "asked"],
            # "asked" is the user's text; the completion is still the text after the tokens.
            "completions": [" t3 t14", " t15 t9"],
            "references": [{"answer": "a"}, {"answer": "b", "prompt": "asked"}],
        }
    ]


def test_a_passing_500_is_tried_again_with_growing_pauses(
    serve: Callable[[Answer], Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("rlhf.rewards.http.time.sleep", pauses.append)
    server = serve(lambda n, asked: good(n, asked) if n == 3 else (503, b"busy"))
    assert reward(server, backoff_s=0.5)(two()).values.tolist() == [2.0, 2.0]
    assert len(server.requests) == 4
    assert all(longest / 2 <= pause <= longest for pause, longest in zip(pauses, (0.5, 1.0, 2.0), strict=True))


def test_a_lasting_500_ends_in_an_error(serve: Callable[[Answer], Server]) -> None:
    server = serve(lambda _n, _asked: (500, b"boom"))
    with pytest.raises(RewardError, match=r"no answer in 4 tries over .* the last: HTTP 500 Internal Server Error"):
        reward(server)(two())
    assert len(server.requests) == 4


def test_a_refusal_is_final(serve: Callable[[Answer], Server]) -> None:
    server = serve(lambda _n, _asked: (422, b"no such field"))
    with pytest.raises(RewardError, match=r"HTTP 422 .*'no such field'"):
        reward(server)(two())
    assert len(server.requests) == 1


def test_a_server_that_is_busy_is_asked_again(serve: Callable[[Answer], Server]) -> None:
    server = serve(lambda n, asked: good(n, asked) if n == 2 else (429, b"slow down"))
    assert reward(server)(two()).values.tolist() == [2.0, 2.0]
    assert len(server.requests) == 3


def test_a_slow_answer_is_tried_again(serve: Callable[[Answer], Server]) -> None:
    def slow_once(n: int, asked: dict[str, Any]) -> tuple[int, bytes]:
        time.sleep(0.6 if n == 0 else 0.0)
        return good(n, asked)

    server = serve(slow_once)
    assert reward(server, timeout_s=0.2)(two()).values.tolist() == [2.0, 2.0]
    assert len(server.requests) == 2


def test_a_server_that_stays_slow_ends_in_an_error(serve: Callable[[Answer], Server]) -> None:
    def slow(n: int, asked: dict[str, Any]) -> tuple[int, bytes]:
        time.sleep(0.3)
        return good(n, asked)

    server = serve(slow)
    with pytest.raises(RewardError, match=r"2 tries .*timeout 0\.1 s each.*timed out"):
        reward(server, timeout_s=0.1, retries=1)(two())


def test_a_server_that_is_not_there_ends_in_an_error() -> None:
    with socket.socket() as taken:  # bound, so that nobody else listens there, but not listening
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(RewardError, match=r"no answer in 3 tries .*[Cc]onnection refused"):
            RemoteReward(url, tokenizer(), retries=2, backoff_s=0.001)(two())


def test_a_connection_that_breaks_is_tried_again(serve: Callable[[Answer], Server]) -> None:
    """An answer shorter than its stated length."""
    broken = threading.Event()

    class Cut(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            body = b'{"scores": [1, 2]}'
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body if broken.is_set() else body[:5])
            broken.set()

        def log_message(self, *_: object) -> None:
            pass

    server = serve(good)
    server.http.RequestHandlerClass = Cut
    assert reward(server)(two()).values.tolist() == [1.0, 2.0]


def test_the_timeout_counts_seconds_without_data(serve: Callable[[Answer], Server]) -> None:
    """Pieces that come within the timeout make an answer that takes longer than it."""

    class Slow(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            for piece in (b'{"sco', b'res": ', b"[1, 2", b"]}"):
                time.sleep(0.2)
                self.wfile.write(piece)

        def log_message(self, *_: object) -> None:
            pass

    server = serve(good)
    server.http.RequestHandlerClass = Slow
    started = time.monotonic()
    assert reward(server, timeout_s=0.5, retries=0)(two()).values.tolist() == [1.0, 2.0]
    assert time.monotonic() - started > 0.5


@pytest.mark.parametrize(
    "body, message",
    [
        (b'{"scores": [1]}', r"1 scores for 2 completions; the first without one: ' t15 t9'"),
        (b'{"scores": [1, NaN]}', r"1 scores of 2 .*for the completion ' t15 t9'"),
        (b'{"scores": "12"}', r"returned str for scores"),
        (b'{"scores": [1, 2], "parts": [3, 4]}', r"returned parts of type list"),
        (b'{"score": [1, 2]}', r"must answer .*scores.*it said '\{\"score\": \[1, 2\]\}'"),
        (b"[1, 2]", r"must answer"),
        (b"<html>oops</html>", r"not JSON .*<html>oops</html>"),
        (b"\xff\xfe\xfa", r"not JSON"),
        (b"[" * 100_000, r"not JSON"),
    ],
)
def test_a_wrong_answer_is_final_and_named(body: bytes, message: str, serve: Callable[[Answer], Server]) -> None:
    server = serve(lambda _n, _asked: (200, body))
    with pytest.raises(RewardError, match=message) as caught:
        reward(server)(two())
    assert server.url in str(caught.value)
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://h/score", "file:///etc/passwd", "http://", "http://h:port", "http://[::1", ""]
)
def test_only_http_addresses(url: str) -> None:
    with pytest.raises(RewardError, match="http:// or https://"):
        RemoteReward(url, tokenizer())


def test_a_column_that_json_cannot_hold_is_named(serve: Callable[[Answer], Server]) -> None:
    batch = replace(two(), references=({"when": {1, 2}}, {}))
    with pytest.raises(RewardError, match="as JSON"):
        reward(serve(good))(batch)
