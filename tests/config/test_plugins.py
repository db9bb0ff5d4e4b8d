"""`plugins:` imports code from outside the package, in every process that is given the configuration."""

import os
import sys

import pytest
import yaml

from drover.pipeline.config.kinds import PLUGINS, plugin_files, plugin_folders
from drover.pipeline.config.loading import dump_config, load_config
from drover.pipeline.contract.run import code_hashes
from drover.pipeline.contract.stages import STAGES, Stage, parse_stages, register_stage
from drover.pipeline.core.errors import UserError
from tests.refusal import refused


@pytest.fixture
def place(tmp_path, no_plugins, monkeypatch):
    """A folder with a plugin, and what it imports from beside it."""
    monkeypatch.delitem(sys.modules, "imported_beside", raising=False)
    (tmp_path / "here").mkdir()
    (tmp_path / "here/plugged_in.py").write_text("import os\nimport imported_beside\nLOADED = os.getpid()\n")
    for name in ("imported_beside.py", "imported_by_nobody.py"):
        (tmp_path / "here" / name).write_text("")
    (tmp_path / "config.yaml").write_text("plugins: [here/plugged_in.py]\n")
    return tmp_path


def test_a_file_beside_the_configuration_is_imported_and_found_by_other_processes(place):
    """Also by those that load the resolved configuration, from anywhere: it has the whole path."""
    loaded = load_config(place / "config.yaml", check=False)
    folder = str(place / "here")
    assert os.getpid() == sys.modules["plugged_in"].LOADED
    assert loaded.plugins == [f"{folder}/plugged_in.py"] and plugin_folders() == [folder]
    assert folder in os.environ["PYTHONPATH"].split(os.pathsep)
    assert yaml.safe_load(dump_config(loaded))["plugins"] == loaded.plugins
    assert plugin_files() == [place / "here/imported_beside.py", place / "here/plugged_in.py"]


def test_a_plugin_of_a_base_is_looked_for_beside_the_base(place):
    mine = place / "mine/config.yaml"
    mine.parent.mkdir()
    mine.write_text("base: ../config.yaml\n")
    assert load_config(mine, check=False).plugins == [f"{place}/here/plugged_in.py"]
    (place / "config.yaml").write_text("plugins: [absent.py]\n")
    refused(UserError, rf"{place}/mine/../config.yaml:1: there is no plugin absent.py \(looked in {place}/mine/\.\.",
            load_config, mine)


def test_a_module_is_imported_by_its_name_and_its_file_is_recorded_as_code(place, monkeypatch):
    package = place / "packaged/inside"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "more.py").write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(str(place / "packaged"))
    load_config(place / "config.yaml", ["plugins=[inside.more]"], check=False)
    assert PLUGINS["inside.more"] == package / "more.py" and plugin_folders() == [str(place / "packaged")]
    assert plugin_files() == [package / "__init__.py", package / "more.py"]
    before = code_hashes(STAGES["shard"])
    (package / "more.py").write_text("VALUE = 2\n")
    changed = {name for name, digest in code_hashes(STAGES["shard"]).items() if before[name] != digest}
    assert changed == {"inside.more"}


@pytest.mark.parametrize("plugins, message", [
    ("[absent.py]", r"the command line \(plugins=\[absent.py\]\): there is no plugin absent.py \(looked in .*"),
    ("[no_such_module]", "plugin no_such_module cannot be imported: ModuleNotFoundError: No module named"),
    ("[here/broken.py]", "broken.py cannot be imported: ZeroDivisionError: division by zero"),
    ("[here/json.py]", "json.py has the name of another module, .*json/__init__.py. Rename it"),
    ("here/plugged_in.py", "`plugins` is a list of modules and files, not 'here/plugged_in.py'")])
def test_what_cannot_be_imported_is_said_in_a_sentence(place, plugins, message):
    (place / "here/broken.py").write_text("1 / 0\n")
    (place / "here/json.py").write_text("")
    refused(UserError, message, load_config, place / "config.yaml", [f"plugins={plugins}"])


@pytest.mark.parametrize("stage, message", [
    (Stage("train", needs=(), reads=(), code=(), own_module="ours"), "There is a stage 'train' already"),
    (Stage("ours", needs=("evaluate",), reads=(), code=(), own_module="ours", after="convert"),
     "'ours' needs evaluate: there is no such stage before it"),
    (Stage("ours", needs=(), reads=(), code=(), own_module="ours", after="converted"),
     "'ours' follows converted: there is no such"),
    (Stage("ours", needs=("shard",), reads=("stages.ours", "shards"), code=(), own_module="ours"),
     "'ours' reads shards: there is no such part of the configuration"),
    (Stage("ours", needs=("shard",), reads=(), code=()), "'ours' must name the module that runs it"),
    (Stage("ours", needs=(), reads=(), code=(), own_module="ours", functions={"file": "a:b"}),
     "'ours' has file: there is no such function of stages. Known are files")])
def test_a_stage_that_cannot_be_is_refused(stage, message):
    refused(ValueError, message, register_stage, stage)
    assert "ours" not in STAGES


def test_a_stage_follows_the_one_that_it_names(monkeypatch):
    monkeypatch.setattr("drover.pipeline.contract.stages.STAGES", {**STAGES})
    check = Stage("check", needs=("convert",), reads=(), code=(), own_module="ours", after="convert")
    for stage in (check, check, Stage("last", needs=("check",), reads=(), code=(), own_module="ours")):
        register_stage(stage)
    assert parse_stages("all") == ["shard", "tokenizer", "encode", "train", "convert", "check", "evaluate", "report",
                                   "last"]
