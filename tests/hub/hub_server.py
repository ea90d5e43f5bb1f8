"""A small Hugging Face Hub on 127.0.0.1: the answers that huggingface_hub asks for."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


@dataclass
class Repository:
    """One repository: its files per branch, and who may read it.

    Attributes:
        gated: everybody sees it, nobody may fetch its files.
        token: with one, the repository exists only for requests that carry it.
    """

    branches: dict[str, dict[str, bytes]]
    gated: bool = False
    token: str | None = None

    @classmethod
    def of_folder(cls, folder: Path, **kwargs: Any) -> Repository:
        files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        return cls(branches={"main": files}, **kwargs)

    def commit(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """Commit and files of a branch or a commit."""
        for branch, files in self.branches.items():
            sha = hashlib.sha1(repr((branch, sorted(files.items()))).encode()).hexdigest()
            if revision in (branch, sha):
                return sha, files
        return None


@dataclass
class Hub:
    """A running server. `served` counts the files sent, `slow_seconds` delays each of them."""

    repositories: dict[str, Repository] = field(default_factory=dict)
    served: Counter[str] = field(default_factory=Counter)
    slow_seconds: float = 0.0

    def __enter__(self) -> Hub:
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def log_message(self, *args: object) -> None:
        pass

    def _answer(self, *, with_body: bool) -> None:
        parts = self.path.partition("?")[0].strip("/").split("/")
        api = parts[0] == "api"
        parts = parts[1:] if api else parts
        kind = parts.pop(0) if parts[0] in ("models", "datasets") else "models"
        repository = self.hub.repositories.get(f"{kind}/{'/'.join(parts[:2])}")
        asked = self.headers.get("Authorization")
        if repository is None or (repository.token and asked != f"Bearer {repository.token}"):
            return self._refuse(404 if asked else 401, "RepoNotFound")
        action, revision, *rest = parts[2:]
        commit = repository.commit(revision)
        if commit is None:
            return self._refuse(404, "RevisionNotFound")
        sha, files = commit
        if api and action == "revision":
            siblings = [{"rfilename": name} for name in files]
            return self._json({"id": "/".join(parts[:2]), "sha": sha, "siblings": siblings})
        if api and action == "tree":
            return self._json([_entry(name, content) for name, content in files.items()])
        if repository.gated:
            return self._refuse(403, "GatedRepo")
        name = "/".join(rest)
        if name not in files:
            return self._refuse(404, "EntryNotFound")
        self._file(name, files[name], sha, with_body)

    def _json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"", {"X-Error-Code": code, "X-Error-Message": code})

    def _file(self, name: str, content: bytes, sha: str, with_body: bool) -> None:
        if with_body:
            threading.Event().wait(self.hub.slow_seconds)
            self.hub.served[name] += 1
        headers = {"ETag": f'"{_blob(content)}"', "X-Repo-Commit": sha}
        self._send(200, content, headers, with_body)

    def _send(
        self, status: int, body: bytes, headers: dict[str, str], with_body: bool = True
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)


def _entry(name: str, content: bytes) -> dict[str, Any]:
    return {"type": "file", "path": name, "size": len(content), "oid": _blob(content)}


def _blob(content: bytes) -> str:
    """Git's name of a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
