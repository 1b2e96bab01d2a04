"""A small Hugging Face Hub on this machine: the parts of its API that downloads and uploads use.

`huggingface_hub` itself speaks to it, so that its cache, its errors and its progress are the real
ones.
"""

import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml
from huggingface_hub import constants

from mujica_jax.models import hub

TOKEN = "hf_token_of_a_test"


class FakeHub:
    """The models of a fake Hub, and the requests that it answered."""

    def __init__(self) -> None:
        # Name of a model -> commit -> path -> content.
        self.commits: dict[str, dict[str, dict[str, bytes]]] = {}
        # Name of a model -> branch -> commit.
        self.branches: dict[str, dict[str, str]] = {}
        self.gated: set[str] = set()
        self.private: set[str] = set()
        self.requests: list[str] = []
        self.address = ""

    def add(self, name: str, folder: Path, branch: str = "main") -> str:
        """Make the files of a folder a new commit of a model, and return the commit."""
        files = {}
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                files[path.relative_to(folder).as_posix()] = path.read_bytes()
        return self.commit(name, files, branch)

    def commit(self, name: str, files: dict[str, bytes], branch: str = "main") -> str:
        number = len(self.commits.setdefault(name, {}))
        commit = hashlib.sha1(f"{name} {branch} {number}".encode()).hexdigest()
        self.commits[name][commit] = files
        self.branches.setdefault(name, {})[branch] = commit
        return commit

    def files(self, name: str, branch: str = "main") -> dict[str, bytes]:
        return self.commits[name][self.branches[name][branch]]


def _handler(fake: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            """Print nothing."""

        def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
            self.send_response(status)
            for key, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(key.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def refuse(self, status: int, code: str) -> None:
            self.answer(status, b"{}", X_Error_Code=code, X_Error_Message=code)

        def answer_json(self, value: object) -> None:
            self.answer(200, json.dumps(value).encode(), Content_Type="application/json")

        def revision_of(self, name: str, revision: str) -> str | None:
            """Return the commit, or None after an error was sent."""
            if name not in fake.commits:
                self.refuse(404, "RepoNotFound")
                return None
            if name in fake.gated and self.headers.get("Authorization") != f"Bearer {TOKEN}":
                self.refuse(403, "GatedRepo")
                return None
            commit = fake.branches[name].get(revision, revision)
            if commit not in fake.commits[name]:
                self.refuse(404, "RevisionNotFound")
                return None
            return commit

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path).strip("/")
            fake.requests.append(f"{self.command} {path}")
            parts = path.split("/")
            if parts[:2] == ["api", "models"]:
                name = "/".join(parts[2:4])
                action, revision = parts[4:6] if len(parts) > 4 else ("revision", "main")
                commit = self.revision_of(name, revision)
                if commit is None:
                    return
                files = fake.commits[name][commit]
                if action == "tree":
                    entries = []
                    for file, content in files.items():
                        oid = hashlib.sha1(content).hexdigest()
                        entries.append(
                            {"type": "file", "path": file, "size": len(content), "oid": oid}
                        )
                    self.answer_json(entries)
                else:
                    siblings = [{"rfilename": file} for file in files]
                    self.answer_json({"id": name, "sha": commit, "siblings": siblings})
                return
            if len(parts) < 5:
                self.answer(404)
                return
            name, revision, file = "/".join(parts[:2]), parts[3], "/".join(parts[4:])
            commit = self.revision_of(name, revision)
            if commit is None:
                return
            content = fake.commits[name][commit].get(file)
            if content is None:
                self.refuse(404, "EntryNotFound")
                return
            etag = f'"{hashlib.sha1(content).hexdigest()}"'
            self.answer(200, content, ETag=etag, X_Repo_Commit=commit)

        do_HEAD = do_GET

        def do_POST(self) -> None:
            path = urlsplit(self.path).path.strip("/")
            fake.requests.append(f"POST {path}")
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                self.answer(401, b"{}")
                return
            parts = path.split("/")
            if path == "api/repos/create":
                wanted = json.loads(body)
                name = f"{wanted['organization']}/{wanted['name']}"
                if name not in fake.commits:
                    fake.commit(name, {})
                if wanted.get("private") or wanted.get("visibility") == "private":
                    fake.private.add(name)
                self.answer_json({"url": f"{fake.address}/{name}"})
                return
            if path == "api/validate-yaml":
                front_matter = json.loads(body)["content"].split("---")[1]
                assert yaml.safe_load(front_matter)["pipeline_tag"] == "text-generation"
                self.answer_json({"errors": [], "warnings": []})
                return
            name = "/".join(parts[2:4])
            if parts[4] == "preupload":
                files = []
                for file in json.loads(body)["files"]:
                    mode = {"uploadMode": "regular", "shouldIgnore": False}
                    files.append({"path": file["path"], **mode})
                self.answer_json({"files": files})
                return
            stored = dict(fake.files(name))
            for line in body.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    content = base64.b64decode(entry["value"]["content"])
                    stored[entry["value"]["path"]] = content
            commit = fake.commit(name, stored)
            self.answer_json(
                {"commitUrl": f"{fake.address}/{name}/commit/{commit}", "commitOid": commit}
            )

    return Handler


@contextlib.contextmanager
def served_hub() -> Iterator[FakeHub]:
    """Serve an empty Hub during a block."""
    fake = FakeHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(fake))
    fake.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def use_hub(monkeypatch: pytest.MonkeyPatch, address: str, cache: Path) -> None:
    """Let huggingface_hub ask this address, with an empty cache and without a token."""
    monkeypatch.setattr(constants, "ENDPOINT", address)
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache / "token"))
    monkeypatch.setattr(constants, "HF_STORED_TOKENS_PATH", str(cache / "stored_tokens"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(hub, "_used_commits", {})
    monkeypatch.setattr(hub, "_required_commits", {})
