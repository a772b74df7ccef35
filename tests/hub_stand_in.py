"""The model hub's API on this machine, limited to creating a repository and committing files."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class HubStandIn:
    """Keeps the repositories that clients create and the files that they commit; small files only (no LFS)."""

    def __init__(self, *, token: str) -> None:
        self.created: list[dict[str, Any]] = []
        self.commits: list[dict[str, bytes]] = []
        self.cards: list[str] = []  # front matter that was sent for validation, with its text
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Authorization") != f"Bearer {token}":
                    self.answer(401, {"error": "Invalid username or password."})
                    return
                self.answer(*outer.answer(self.path, body))

            def do_GET(self) -> None:
                repository = outer.repositories().get(self.path.removeprefix("/api/models/"))
                if repository is None or self.headers.get("Authorization") != f"Bearer {token}":
                    self.answer(401, {"error": "Invalid username or password."})
                else:
                    self.answer(200, repository)

            def answer(self, status: int, content: dict[str, Any]) -> None:
                data = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def repositories(self) -> dict[str, dict[str, Any]]:
        """The information on each repository from its creation."""
        first = {f"{asked['organization']}/{asked['name']}": asked for asked in reversed(self.created)}
        return {name: {"id": name, "private": asked.get("visibility") == "private"} for name, asked in first.items()}

    def answer(self, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        """Status and content for a request."""
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            is_new = name not in [f"{old['organization']}/{old['name']}" for old in self.created]
            self.created.append(asked)
            return (200 if is_new else 409), {"url": f"{self.url}/{name}", "error": "" if is_new else "it exists"}
        if path == "/api/validate-yaml":
            self.cards.append(json.loads(body)["content"])
            return 200, {"errors": [], "warnings": []}
        if path.endswith("/preupload/main"):
            names = [file["path"] for file in json.loads(body)["files"]]
            return 200, {"files": [{"path": n, "uploadMode": "regular", "shouldIgnore": False} for n in names]}
        if path.endswith("/commit/main"):
            lines = [json.loads(line) for line in body.splitlines()]
            files = [line["value"] for line in lines if line["key"] == "file"]
            self.commits.append({file["path"]: base64.b64decode(file["content"]) for file in files})
            name = path.removeprefix("/api/models/").removesuffix("/commit/main")
            return 200, {"commitUrl": f"{self.url}/{name}/commit/0", "commitOid": "0" * 40}
        return 404, {"error": f"no {path}"}

    def close(self) -> None:
        self.http.shutdown()
        self.thread.join()
        self.http.server_close()


@contextmanager
def hub_stand_in(*, token: str = "hf_right") -> Iterator[HubStandIn]:
    hub = HubStandIn(token=token)
    try:
        yield hub
    finally:
        hub.close()
