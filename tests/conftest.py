"""Shared by the tests: a miniature corpus and configuration, and stages run as users run them."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import yaml

REPOSITORY = Path(__file__).resolve().parents[1]

MINI = {
    "name": "mini",
    "shard": {"shard_mb": 0.03, "heldout_share": 0.1},
    "tokenizer": {"vocab_size": 768, "train_mb": 1.0},
    "model": {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 64, "context_length": 128},
    "train": {"steps": 12, "sequence_length": 64, "batch_tokens": 1024, "micro_batch": 4, "lr": 0.01,
              "warmup_steps": 3, "heldout_every": 4, "heldout_tokens": 2000, "sample_every": 6, "sample_tokens": 8,
              "prompts": ["def ", "import "], "checkpoint": {"every_steps": 4}},
    "convert": {"check_tokens": 64},
    "evaluate": {"heldout_tokens": 4000, "prompts": ["def "], "prompt_tokens": 8},
    "launch": {"processes": 2},
}


def merged(base: dict, changes: dict) -> dict:
    """`changes` laid over `base`, section by section."""
    return {**base, **{key: merged(base[key], value) if isinstance(value, dict) and isinstance(base.get(key), dict)
                       else value for key, value in changes.items()}}


def write_config(folder: Path, corpus: Path, **changes: object) -> Path:
    """A miniature configuration in `folder` over the text files of `corpus`."""
    source = {"kind": "files", "name": "code", "paths": [f"{corpus}/*.txt"]}
    config = merged({**MINI, "runs_dir": str(folder / "runs")}, {"shard": {"sources": [source]}})
    path = folder / "mini.yaml"
    path.write_text(yaml.safe_dump(merged(config, changes)))
    return path


def environment(threads: int = 1) -> dict[str, str]:
    """The environment of a child: ours importable, few threads, no network libraries phoning home."""
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}


def stage_command(stage: str, config: Path, *overrides: str, ranks: int = 1) -> list[str]:
    """The command of one stage; with several ranks under torch's elastic agent."""
    start = [sys.executable] if ranks == 1 else [sys.executable, "-m", "torch.distributed.run", "--standalone",
                                                 f"--nproc-per-node={ranks}"]
    return [*start, "-m", f"pipeline.{stage}", "--config", str(config), *overrides]


def run_stage(stage: str, config: Path, *overrides: str, ranks: int = 1, expect: int = 0,
              **variables: str) -> subprocess.CompletedProcess[str]:
    """Run one stage to its end and check its exit status; variables: more of its environment."""
    result = subprocess.run(stage_command(stage, config, *overrides, ranks=ranks), cwd=REPOSITORY, text=True,
                            capture_output=True, env={**environment(), **variables}, timeout=300, check=False)
    failed = result.returncode != 0
    assert failed == (expect != 0) and (ranks > 1 or result.returncode == expect), result.stdout + result.stderr
    return result


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
def encoded(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """Config of a run whose shard, tokenizer and encode stages are done; its folder is `runs/mini` beside it."""
    config = write_config(tmp_path_factory.mktemp("encoded"), corpus)
    for stage in ("shard", "tokenizer", "encode"):
        run_stage(stage, config)
    return config


@pytest.fixture
def fresh(tmp_path: Path, encoded: Path) -> Path:
    """Config of a new run that reuses the encoded one: training can start at once."""
    config = yaml.safe_load(encoded.read_text())
    config.update(runs_dir=str(tmp_path / "runs"), reuse=str(encoded.parent / "runs/mini"))
    path = tmp_path / "mini.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture
def place(tmp_path):
    """A config file over one small text file, in a folder of its own."""
    (tmp_path / "corpus.txt").write_text("some text\n")
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({
        "name": "a", "runs_dir": str(tmp_path / "runs"), "launch": {"processes": 1},
        "shard": {"sources": [{"kind": "files", "name": "t", "paths": [str(tmp_path / "corpus.txt")]}]}}))
    return tmp_path
