"""docs/generation.md is true: its commands and its Python run on a small model, in their order."""

import re
import shlex
import shutil
import socket
import subprocess
import sys
import urllib.request

import pytest

from pipeline.tokenization.simple import ByteTokenizer
from tests.conftest import REPOSITORY, environment
from tests.tiny_models import for_tokenizer, write_huggingface, write_run
from tests.tools.test_serve import pytestmark as needs_server
from tests.waiting import HANG_S, wait_for
from tools import bench_generate, chat
from tools.model_options import add_sampling_options

PAGE = (REPOSITORY / "docs/generation.md").read_text()
BLOCKS = re.findall(r"(<!-- needs.*? -->\n)?```(bash|python)\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [line for needs, language, text in BLOCKS if language == "bash" and not needs for line in text.splitlines()]
TOKENIZER = ByteTokenizer()


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a small run in the place of the demo's."""
    folder = tmp_path_factory.mktemp("home")
    model = for_tokenizer(TOKENIZER)
    write_huggingface(write_run(folder / "runs/demo", {5: model}, TOKENIZER) / "convert/hf", model, TOKENIZER)
    return folder


@pytest.mark.parametrize("command", [command for command in COMMANDS if "tools.chat" in command])
def test_the_commands_of_the_terminal(home, command, monkeypatch, capsys):
    monkeypatch.chdir(home)
    words = shlex.split(command)
    assert words[:3] == ["python", "-m", "tools.chat"] and chat.main(words[3:]) == 0
    assert capsys.readouterr().out.startswith("def main():")


def test_the_benchmark_of_the_page(capsys):
    [command] = [command for command in COMMANDS if "tools.bench_generate" in command]
    words = shlex.split(command)
    assert words[:3] == ["python", "-m", "tools.bench_generate"] and bench_generate.main(words[3:]) == 0
    assert "ladder_15m" in capsys.readouterr().out


def test_the_python_of_the_page(home, monkeypatch, capsys):
    monkeypatch.chdir(home)
    [code] = [text for _, language, text in BLOCKS if language == "python"]
    exec(compile(code, "docs/generation.md", "exec"), {})  # noqa: S102 - the page's own
    [texts] = [eval(line) for line in capsys.readouterr().out.splitlines()]  # noqa: S307
    assert len(texts) == 2 and all(texts)


@needs_server
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed: apt-get install curl")
def test_the_server_and_the_requests_of_the_page(home):
    [command] = [command for command in COMMANDS if "tools.serve" in command]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    words = shlex.split(command.replace("8000", port))
    server = subprocess.Popen([sys.executable, *words[1:]], cwd=home, env=environment(), stdout=subprocess.PIPE,
                              text=True)
    try:
        assert server.stdout is not None
        assert "/v1/completions" in wait_for(server.stdout.readline, of=server)
        assert "<textarea" in urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=HANG_S).read().decode()
        answers = [subprocess.run(command.replace("8000", port), shell=True, capture_output=True, text=True, check=True,
                                  timeout=HANG_S).stdout for command in COMMANDS if command.startswith("curl")]
    finally:
        server.terminate()
        server.wait()
    assert '"text_completion"' in answers[0] and answers[1].endswith("data: [DONE]\n\n") and '"ok"' in answers[2]
    assert '"text_offset"' in answers[3] and '"token_logprobs":[null,-' in answers[3]
    assert all("error" not in answer for answer in answers)


def test_every_option_is_on_the_page():
    import argparse
    parser = argparse.ArgumentParser(add_help=False)
    add_sampling_options(parser)
    for action in parser._actions:
        assert f"`{action.option_strings[0]}`" in PAGE
