"""A Hub of models and data sets (`datasets/OWNER/NAME`) on 127.0.0.1, which speaks the Hugging Face Hub's protocol to
huggingface_hub itself, and an empty cache of its own.

    def test_something(hub):
        commit = hub.push("someone/llama", folder)     # the branch main moves there; "datasets/..." for a data set
        hub.off = True                                 # there is no network
        run_python(..., **hub.variables)
"""

import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

TOKEN = "hf_of_this_test"
REQUEST = re.compile(r"/(?:api/(?:models/|(?=datasets/)))?(?P<name>(?:datasets/)?[^/]+/[^/]+)"
                     r"(?:/(?P<what>revision|tree|resolve)/(?P<revision>[^/?]+)(?:/(?P<path>[^?]+))?)?(?:\?|$)")


@dataclass
class Hub:
    """Repositories by name: their commits by branch, tag or hash, and the files of each. `closed` ones show their files
    to TOKEN only; of `hidden` ones others do not even see that they exist. `seen`: each request's method and path."""

    home: Path
    address: str = ""
    revisions: dict[str, dict[str, str]] = field(default_factory=dict)
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    closed: set[str] = field(default_factory=set)
    hidden: set[str] = field(default_factory=set)
    seen: list[tuple[str, str]] = field(default_factory=list)
    off: bool = False

    def push(self, name, folder, *tags):
        """A new commit with the files of a folder; its hash."""
        files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*"))
                 if path.is_file()}
        commit = hashlib.sha1(repr((name, files)).encode()).hexdigest()
        self.files[commit] = files
        self.revisions.setdefault(name, {}).update(dict.fromkeys(("main", commit, *tags), commit))
        return commit

    @property
    def variables(self):
        """The environment in which huggingface_hub takes this for the Hub."""
        return {"HF_ENDPOINT": self.address, "HF_HOME": str(self.home), "HF_HUB_OFFLINE": "0"}

    @property
    def downloaded(self):
        """The files that were downloaded, in order."""
        return [path.rpartition("/")[2] for method, path in self.seen if method == "GET" and "/resolve/" in path]


def answering(hub):
    """The class of a server's handler."""
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            hub.seen.append((self.command, self.path))
            match = REQUEST.match(self.path)
            allowed = self.headers.get("authorization") == f"Bearer {TOKEN}"
            name = match and match["name"]
            if hub.off:
                self.close_connection = True
            elif name not in hub.revisions or (name in hub.hidden and not allowed):
                self.answer(401, {"X-Error-Code": "RepoNotFound"})
            elif (commit := hub.revisions[name].get(match["revision"] or "main")) is None:
                self.answer(404, {"X-Error-Code": "RevisionNotFound"})
            elif match["what"] in ("revision", None):
                self.answer(200, {}, json.dumps({"id": name.removeprefix("datasets/"), "sha": commit}).encode())
            elif match["what"] == "tree":
                self.answer(200, {}, json.dumps([
                    {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                    for path, data in hub.files[commit].items()]).encode())
            elif name in hub.closed and not allowed:
                self.answer(403, {"X-Error-Code": "GatedRepo"})
            else:
                data = hub.files[commit][match["path"]]
                self.answer(200, {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha256(data).hexdigest()}"'}, data)

        def do_HEAD(self):
            self.do_GET()

        def answer(self, status, headers, data=b"{}"):
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)

        def log_message(self, *_):
            pass
    return Handler


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A Hub without repositories, for this process and those that are given its `variables`."""
    from huggingface_hub import constants, get_token
    hub = Hub(tmp_path / "hf-home")
    with ThreadingHTTPServer(("127.0.0.1", 0), answering(hub)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        hub.address = f"http://127.0.0.1:{server.server_port}"
        for name, value in {"ENDPOINT": hub.address, "HF_HUB_CACHE": str(hub.home / "hub"), "HF_HUB_OFFLINE": False,
                            "HF_TOKEN_PATH": str(hub.home / "token"), "HUGGINGFACE_CO_URL_TEMPLATE":
                                hub.address + "/{repo_id}/resolve/{revision}/{filename}"}.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        assert get_token() is None
        yield hub
        server.shutdown()
