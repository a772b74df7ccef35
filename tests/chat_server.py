"""An OpenAI-compatible endpoint on this machine, for tests: it answers by a function of the question."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from unittest import mock

Reply = str | None | tuple[int, bytes] | tuple[int, bytes, dict[str, str]]


class ChatServer:
    """`answer(n, question)`: the content of the answer to request n; or a response: status and body, and headers."""

    def __init__(self, answer: Callable[[int, str], Reply]) -> None:
        self.requests: list[dict[str, Any]] = []
        self.headers: list[Mapping[str, str]] = []
        self.paths: list[str] = []
        self.running = self.most = 0
        self.lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer.lock:
                    number = len(outer.requests)
                    outer.requests.append(asked)
                    outer.headers.append(dict(self.headers))
                    outer.paths.append(self.path)
                    outer.running += 1
                    outer.most = max(outer.most, outer.running)
                reply = answer(number, asked["messages"][0]["content"])
                with outer.lock:
                    outer.running -= 1
                status, body, *more = reply if isinstance(reply, tuple) else (200, chat(reply))
                try:
                    self.send_response(status)
                    for name, value in more[0].items() if more else ():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(body)
                except OSError:  # the client has given up
                    pass

            def log_message(self, *_: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            request_queue_size = 64  # more requests at once than the usual 5 would wait for a second

        self.http = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1"
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def close(self) -> None:
        """Stop listening."""
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()


@contextmanager
def serving(answer: Callable[[int, str], Reply]) -> Iterator[ChatServer]:
    """An endpoint while the block lasts."""
    with mock.patch.dict(os.environ, {"no_proxy": "127.0.0.1"}):
        server = ChatServer(answer)
        try:
            yield server
        finally:
            server.close()


def chat(content: str | None) -> bytes:
    """An answer in OpenAI's form."""
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": content}}]}).encode()
