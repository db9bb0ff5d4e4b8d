"""Shared by the tests: a miniature corpus and configuration, and stages run as users run them."""

import os
import shutil
import subprocess
import sys
import sysconfig
from functools import cache
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, settings

from drover.pipeline.config.kinds import PLUGINS
from tests.cloud_servers import azurite, azurite_server, google, google_server  # noqa: F401 - fixtures of all
from tests.object_store import moto_application, moto_server, seaweed, seaweed_bucket  # noqa: F401 - fixtures of all
from tests.waiting import HANG_S
from tests.warm import WarmServer
from tests.workers import pytest_addoption, pytest_configure  # noqa: F401 - hooks of this conftest

REPOSITORY = Path(__file__).resolve().parents[1]

settings.register_profile("drover", deadline=None, suppress_health_check=[
    HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
settings.load_profile("drover")  # no test has a time limit of its own, and fixtures may be shared by examples

needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None,
    reason="no C++ compiler, with which torch.compile makes code for CPUs: apt-get install g++")
"""For tests that compile."""

MINI = {
    "name": "mini",
    "shard": {"shard_mb": 0.03, "validation_share": 0.1},
    "tokenizer": {"vocab_size": 768, "train_mb": 1.0},
    "model": {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 64, "context_length": 128},
    "train": {"steps": 12, "sequence_length": 64, "batch_tokens": 1024, "micro_batch": 4, "lr": 0.01,
              "warmup_steps": 3, "validation_every": 4, "validation_tokens": 2000, "sample_every": 6,
              "sample_tokens": 8, "prompts": ["def ", "import "], "checkpoint": {"every_steps": 4}},
    "evaluate": {"validation_tokens": 4000, "prompts": ["def "], "prompt_tokens": 8},
    "launch": {"processes": 2},
}


def slow(*values):
    """Values of a parameter that are left to `make test-all`."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def merged(base, changes):
    """`changes` laid over `base`, section by section."""
    return {**base, **{key: merged(base[key], value) if isinstance(value, dict) and isinstance(base.get(key), dict)
                       else value for key, value in changes.items()}}


def write_config(folder, corpus, **changes):
    """A miniature configuration in `folder` over the text files of `corpus`."""
    source = {"kind": "files", "name": "code", "paths": [f"{corpus}/*.txt"]}
    config = merged({**MINI, "runs_dir": str(folder / "runs")}, {"shard": {"sources": [source]}})
    path = folder / "mini.yaml"
    path.write_text(yaml.safe_dump(merged(config, changes)))
    return path


def environment(threads=1):
    """The environment of a child: ours importable, few threads, no network libraries phoning home, bytecode kept."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}


def run_python(*arguments, check=True, cwd=REPOSITORY, **variables):
    """An interpreter with these arguments, to its end; variables: more of its environment."""
    return subprocess.run([sys.executable, *map(str, arguments)], cwd=cwd, env={**environment(), **variables},
                          text=True, capture_output=True, check=check, timeout=HANG_S)


def stage_command(stage, config, *overrides):
    """The command of one stage, as one process."""
    return [sys.executable, "-m", f"drover.pipeline.{stage}", "--config", str(config), *overrides]


def start_stage(stage, config, *overrides, ranks=1, limits=None, limited=None, **variables):
    """Start one stage, by a fork of a process that has imported what it needs (tests/warm.py).

    limits: resource limits, of the ranks `limited` only if that is given; variables: more of its environment.
    """
    return warm_server().start([f"drover.pipeline.{stage}", "--config", str(config), *overrides],
                               {**environment(), **variables}, ranks=ranks, limits=limits, limited=limited)


def run_stage(stage, config, *overrides, ranks=1, expect=0, limits=None, **variables):
    """Run one stage to its end and check its exit status.

    Stages without ranks run in an interpreter of their own: a hash seed of each one's own shows what depends on it.
    limits: of stages with ranks only.
    """
    if stage not in ("train", "convert", "evaluate"):
        assert not limits and ranks == 1
        result = subprocess.run(stage_command(stage, config, *overrides), cwd=REPOSITORY, text=True,
                                capture_output=True, env={**environment(), **variables}, timeout=HANG_S, check=False)
    else:
        process = start_stage(stage, config, *overrides, ranks=ranks, limits=limits, **variables)
        said, complaint = process.communicate(HANG_S)
        result = subprocess.CompletedProcess(process.args, process.wait(), said, complaint)
    failed = result.returncode != 0
    assert failed == (expect != 0) and (ranks > 1 or result.returncode == expect), result.stdout + result.stderr
    return result


def pytest_collection_finish(session):
    """Keep torch to one thread, and start the server of warm processes, before the workers are forked and share it."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)  # threads of several workers on the same cores spin while they wait for each other
    if session.config.option.workers and not session.config.option.collectonly:
        warm_server()


def pytest_sessionfinish():
    if warm_server.cache_info().currsize:
        warm_server().close()


@cache
def warm_server():
    """This session's server of warm processes, started when the first is asked for."""
    return WarmServer(environment())


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """About 0.13 MB of real text: some of the standard library's sources, as .txt files."""
    folder = tmp_path_factory.mktemp("corpus")
    library, size = Path(sysconfig.get_paths()["stdlib"]), 0
    for path in sorted(library.glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        if size < 130_000 and len(text) < 9_000:
            (folder / f"{path.stem}.txt").write_text(text, encoding="utf-8")
            size += len(text)
    return folder


@pytest.fixture(scope="session")
def encoded(tmp_path_factory, corpus):
    """Config of a run whose shard, tokenizer and encode stages are done; its folder is `runs/mini` beside it."""
    from tests.stages.here import prepare_here  # with torch, which not every session needs
    config = write_config(tmp_path_factory.mktemp("encoded"), corpus)
    prepare_here(config)
    return config


@pytest.fixture
def fresh(tmp_path, encoded):
    """Config of a new run that reuses the encoded one: training can start at once.

    One process accumulates over two micro-batches, two ranks have one each.
    """
    from tests.stages.training import reusing
    return reusing(encoded, tmp_path, train={"micro_batch": 8})


@pytest.fixture
def place(tmp_path):
    """A config file over one small text file, in a folder of its own."""
    (tmp_path / "corpus.txt").write_text("some text\n")
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({
        "name": "a", "runs_dir": str(tmp_path / "runs"), "launch": {"processes": 1},
        "shard": {"sources": [{"kind": "files", "name": "t", "paths": [str(tmp_path / "corpus.txt")]}]}}))
    return tmp_path


@pytest.fixture
def no_plugins(monkeypatch):
    """None are imported yet; what importing some changes in this process is undone."""
    for name in PLUGINS.copy():
        monkeypatch.delitem(PLUGINS, name)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    yield
    for name in PLUGINS.copy():
        sys.modules.pop(name, None)
        del PLUGINS[name]
