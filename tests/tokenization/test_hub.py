"""A tokenizer by its name on the Hub: the real client against a small server that answers as the Hub does."""

import http.server
import json
import os
import subprocess
import sys
import threading

import pytest

from pipeline.tokenization.hub import names_the_hub
from tests.conftest import REPOSITORY

FILES = {"tokenizer.json": b'{"model": {}}', "tokenizer_config.json": b'{"bos_token": "<s>"}',
         "model.safetensors": b"x"}
COMMIT = "0123456789abcdef0123456789abcdef01234567"
ASK = """
import sys
from pipeline.errors import UserError
from pipeline.tokenization.hub import fetched
try:
    folder = fetched("someone/some-model", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
    print(sorted((path.name, path.read_text()) for path in folder.iterdir()))
except UserError as error:
    print("refused:", error)
"""


class Hub(http.server.BaseHTTPRequestHandler):
    asked: list[str] = []

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        self.asked.append(self.path)
        name = self.path.partition("?")[0].rpartition("/")[2]
        if self.path.startswith("/api/models/someone/some-model/tree/"):
            body = json.dumps([{"type": "file", "path": file, "size": len(content), "oid": file}
                               for file, content in FILES.items()]).encode()
        elif self.path.startswith("/api/models/someone/some-model"):
            body = json.dumps({"id": "someone/some-model", "sha": COMMIT,
                               "siblings": [{"rfilename": file} for file in FILES]}).encode()
        elif "/resolve/" in self.path and name in FILES:
            body = FILES[name]
        else:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "application/json" if self.path.startswith("/api") else "text/plain")
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{name}"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *arguments):
        """Say nothing."""


@pytest.fixture
def hub():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    Hub.asked = []
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()


def ask(folder, **variables):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    answer = subprocess.run([sys.executable, "-c", ASK], cwd=REPOSITORY, capture_output=True, text=True, check=False,
                            env={**environment, "HF_HOME": str(folder), "HF_HUB_DISABLE_XET": "1", **variables})
    assert answer.returncode == 0, answer.stderr
    return answer.stdout.strip()


def test_it_is_fetched_once_and_then_read_from_the_cache(hub, tmp_path):
    found = ask(tmp_path, HF_ENDPOINT=hub)
    assert found == str([(name, FILES[name].decode()) for name in ("tokenizer.json", "tokenizer_config.json")])
    assert not any("safetensors" in path for path in Hub.asked)
    asked = len(Hub.asked)
    assert ask(tmp_path, HF_ENDPOINT=hub) == found and len(Hub.asked) == asked
    assert ask(tmp_path, HF_HUB_OFFLINE="1") == found


def test_where_there_is_no_network_it_says_what_to_do(tmp_path):
    said = ask(tmp_path, HF_ENDPOINT="http://127.0.0.1:9", HF_HUB_OFFLINE="1")
    assert said.startswith("refused: tokenizer.path: nothing lies at someone/some-model")
    assert "hf download someone/some-model tokenizer.json" in said


def test_what_lies_here_is_never_taken_for_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert names_the_hub("meta-llama/Llama-3.2-1B")
    (tmp_path / "meta-llama").mkdir()
    assert not names_the_hub("meta-llama/Llama-3.2-1B")  # more likely a misspelt folder
    for path in ("tokenizer.json", "/a/b", "./a/b", "a/b/c", "../a", "s3://a"):
        assert not names_the_hub(path)
