"""Opening a run that somebody else made imports no code of it; what the user names is imported."""

import os
import sys

import pytest
import yaml

from drover.__main__ import main
from drover.launch import commands, status, submit
from drover.pipeline.config.loading import load_config
from drover.pipeline.contract.entry import stage_main
from drover.pipeline.contract.run import run_in
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import sealed_text
from drover.pipeline.encode import encode
from drover.pipeline.tokenization.conversion import byte_tokenizer
from drover.tools.verify import main as verify
from tests.conftest import merged
from tests.evaluation.task_pack import write_pack
from tests.refusal import printed, refused, table
from tests.tiny_models import for_tokenizer, write_run
from tests.tools.recorded import Recorded

TOOLS = table("""
    trace --run {data} --step 3 -> 0
    audit --run {data} -> 0
    verify --run {data} -> 0
    copy-tokens --run {data} --to file://{out} -> 0
    export-tokens --run {data} --out {out} -> 0
    chat {model} x --max-tokens 1 -> 0
    compare {out} {tasks} --validation {data} -> 2
    weights {model} --to {out} --format hf -> 0""", str, int)
REUSING = {
    "--dry-run": (submit.main, "--stage encode --cluster local --dry-run"),
    "a stage": (lambda arguments: stage_main("encode", encode, arguments), ""),
}


@pytest.fixture(scope="module")
def home(tmp_path_factory, encoded):
    """Runs whose settings name a module as plugin, optimizer, filter and sink: one with data and records, one with
    weights. The module leaves a file when it is imported."""
    home = tmp_path_factory.mktemp("foreign")
    plugin = home / "foreign_code.py"
    plugin.write_text("from pathlib import Path\nPath(__file__).with_suffix('.ran').touch()\n")
    data = Recorded(home / "data", encoded, settings=["name=data"]).folder
    theirs = {"plugins": [str(plugin)], "shard": {"filters": [{"kind": "foreign_code:Filter"}]},
              "train": {"optimizer": "foreign_code:kind", "log_to": [{"kind": "foreign_code:Sink"}]}}
    config = merged(load_config(data / "config.yaml").model_dump(mode="json"), theirs)
    (data / "config.yaml").write_text(sealed_text(yaml.safe_dump(config)))
    write_run(home / "model", {3: for_tokenizer(byte_tokenizer())}, byte_tokenizer(), **theirs)
    write_pack(home / "tasks")
    return home


@pytest.fixture
def ran(home, no_plugins, monkeypatch):
    """The file that the module leaves, which could be imported as if it were installed."""
    monkeypatch.syspath_prepend(str(home))
    yield home / "foreign_code.ran"
    (home / "foreign_code.ran").unlink(missing_ok=True)
    sys.modules.pop("foreign_code", None)


@pytest.mark.parametrize("named", [False, True], ids=["opened", "named"])
@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool[0].split()[0])
def test_a_tool_imports_what_its_user_names(home, ran, tmp_path, monkeypatch, capsys, tool, named):
    words, expected = tool
    plugin = str(home / "foreign_code.py")
    places = {"data": home / "data", "model": home / "model", "tasks": home / "tasks", "out": tmp_path / "out"}
    name, *arguments = [*words.format(**places).split(), *(["--plugin", plugin] if named else [])]
    result = main([name, *arguments])
    assert (ran.exists(), result) == (named, expected)
    assert "plugin" not in capsys.readouterr().err


@pytest.mark.parametrize("named", [False, True], ids=["reused", "named"])
@pytest.mark.parametrize("way", REUSING)
def test_who_reuses_a_run_imports_what_its_own_configuration_names(home, ran, fresh, capsys, way, named):
    program, arguments = REUSING[way]
    plugin = home / "foreign_code.py"
    result = program([*arguments.split(), "--config", str(fresh), f"reuse={home / 'data'}",
                     *([f"plugins=[{plugin}]"] if named else [])])
    assert (ran.exists(), result) == (named, 0)
    output = capsys.readouterr()
    assert "foreign_code" not in output.err and (named or "code has changed" not in output.out)


def test_who_looks_at_a_run_or_stops_it_imports_nothing(home, ran, capsys):
    run = str(home / "data")
    assert status.main(["--run", run]) == 0
    for command, *more in [commands.logs, "train"], [commands.stop], [commands.cancel]:
        command([run, *more])
    assert not ran.exists()


def test_settings_that_need_a_plugin_are_refused_with_its_name(tmp_path, ran):
    """A plugin may extend Drover's own tables, so that nobody else can read the configuration."""
    (tmp_path / "config.yaml").write_text("plugins: [theirs.py]\nshard: {filters: [{kind: theirs}]}\n")
    refused(UserError, r"(?s)no filter of the kind.*not imported: theirs.py.*--plugin theirs.py", run_in, tmp_path)


@pytest.mark.parametrize(("key", "settings"), table("""
    base -> base: /dev/zero
    base -> base: [pipe]
    model.preset -> model: {preset: /dev}"""))
def test_a_run_names_no_other_files_that_its_configuration_is_read_from(tmp_path, key, settings, capsys):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "config.yaml").write_text(settings)
    refused(UserError, f"config.yaml:1: unknown key '{key}'", run_in, tmp_path)
    assert verify([str(tmp_path)]) == 1
    assert tmp_path.name in printed(capsys, status.main, tmp_path)
