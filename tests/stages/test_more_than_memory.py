"""A model that is larger than what a rank may take is exported, proven and evaluated, under a limit that the kernel
keeps; taken whole, neither can be done under it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from pipeline.config.loading import load_config
from pipeline.contract.manifest import read_manifest
from pipeline.contract.run import Run
from tests.conftest import REPOSITORY, environment, run_stage, write_config
from tests.stages.test_convert import fake_training
from tests.waiting import HANG_S

LAYERS = 36
CONVERT_MB, EVALUATE_MB = 70, 200
"""Beyond what importing takes. One process that converts holds a block of the model at a time; each of two ranks that
evaluate holds half of it and two blocks, beside some 50 MB of a process group's threads."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that is trained, as far as its files tell: 180 MB of float32 weights in pieces of three ranks."""
    folder = tmp_path_factory.mktemp("larger")
    (folder / "corpus").mkdir()
    for number in range(40):
        (folder / f"corpus/{number}.txt").write_text(f"def function_{number}(x):\n    return x * {number}\n" * 4)
    config = write_config(
        folder, folder / "corpus", shard={"heldout_share": 0.2}, tokenizer={"kind": "byte"},
        model={"dim": 320, "layers": LAYERS, "heads": 4, "kv_heads": 4, "ffn_dim": 864, "context_length": 128},
        convert={"max_shard_mb": 8, "check_tokens": 32}, train={"sequence_length": 64},
        evaluate={"prompts": ["def ", "return x"], "prompt_tokens": 3, "batch": 1, "heldout_tokens": 500})
    for stage in ("shard", "tokenizer", "encode"):
        run_stage(stage, config)
    fake_training(Run(load_config(config)))
    assert read_manifest(config.parent / "runs/mini/train").counts["parameters"] * 4 > 175e6
    return config


def limited(stage, megabytes, config, *overrides, ranks=1):
    """The stage, in processes that may each take so much memory beyond what they import."""
    start = [sys.executable] if ranks == 1 else [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return subprocess.run([*start, "-m", "tests.stages.limited", stage, str(megabytes), "--config", str(config),
                           *overrides], cwd=REPOSITORY, env=environment(), capture_output=True, text=True,
                          timeout=HANG_S, check=False)


@pytest.fixture(scope="module")
def exported(run):
    """The same run, converted under the limit."""
    whole = limited("convert", CONVERT_MB, run)
    assert whole.returncode != 0 and "memory" in whole.stderr.lower(), whole.stdout + whole.stderr
    assert read_manifest(run.parent / "runs/mini/convert") is None
    ended = limited("convert", CONVERT_MB, run, "convert.check_memory_gb=0.01")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return run


def test_an_export_is_proven_in_the_memory_of_a_block(exported):
    counts = read_manifest(exported.parent / "runs/mini/convert").counts
    assert counts["layers_compared"] == LAYERS and counts["tensors_compared"] == LAYERS * 9 + 3
    assert 0 < counts["transformers_logit_error"] <= 10 * counts["single_precision_logit_error"]


def test_two_ranks_evaluate_what_neither_could_hold(exported):
    """The limit decides by itself that the weights are sharded, and every figure is that of one process."""
    whole = limited("evaluate", EVALUATE_MB, exported, "evaluate.dp_shard=1", ranks=2)
    assert whole.returncode != 0 and "memory" in whole.stderr.lower(), whole.stdout + whole.stderr
    ended = limited("evaluate", EVALUATE_MB, exported, ranks=2)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "weights sharded over 2 ranks (FSDP2, gathered block by block)" in ended.stdout
    folder = exported.parent / "runs/mini/evaluate"
    assert read_manifest(folder).counts["dp_shard"] == 2
    shared = json.loads((folder / "results.json").read_text())
    run_stage("evaluate", exported, "--force")
    assert read_manifest(folder).counts["dp_shard"] == 1
    assert json.loads((folder / "results.json").read_text()) == shared
