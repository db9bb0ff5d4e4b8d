"""A model that is larger than what a rank may take is exported, proven and evaluated, under a limit that the kernel
keeps; taken whole, neither can be done under it."""

import pytest

from drover.pipeline.core.files import read_json
from tests.conftest import run_python, write_config
from tests.stages.here import prepare_here
from tests.stages.limited import LARGE_TENSORS
from tests.stages.small_run import fake_training
from tests.stages.training import manifest_of

LAYERS = 72
CONVERT_MB, EVALUATE_MB = 140, 330
"""Beyond what importing takes. One process that converts holds a block of the model at a time. 90 MB are enough on an
idle machine, but not always on a very busy one (a load of 100), where more threads run at once. Each of two ranks that
evaluate holds half of it and two blocks, beside some 100 MB of a process group, its threads and their heaps."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that is trained, as far as its files tell: 355 MB of float32 weights in pieces of three ranks."""
    folder = tmp_path_factory.mktemp("larger")
    (folder / "corpus").mkdir()
    for number in range(40):
        (folder / f"corpus/{number}.txt").write_text(f"def function_{number}(x):\n    return x * {number}\n" * 4)
    config = write_config(
        folder, folder / "corpus", shard={"validation_share": 0.2}, tokenizer={"kind": "byte"},
        model={"dim": 320, "layers": LAYERS, "heads": 4, "kv_heads": 4, "ffn_dim": 864, "context_length": 128},
        convert={"max_shard_mb": 8}, train={"sequence_length": 64},
        evaluate={"prompts": ["def ", "return x"], "prompt_tokens": 3, "batch": 1, "validation_tokens": 500})
    prepare_here(config)
    fake_training(config, kinds=("model",))
    assert manifest_of(config, "train").counts["parameters"] * 4 > 350e6
    return config


def limited(stage, megabytes, config, *overrides, ranks=1):
    """The stage, in processes that may each take so much memory beyond what they import."""
    agent = [] if ranks == 1 else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return run_python(*agent, "-m", "tests.stages.limited", stage, megabytes, "--config", config, *overrides,
                      check=False, **LARGE_TENSORS)


@pytest.fixture(scope="module")
def exported(run):
    """The same run, converted under the limit."""
    ended = limited("convert", CONVERT_MB, run)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return run


@pytest.mark.slow
def test_an_export_is_proven_in_the_memory_of_a_block(exported):
    counts = manifest_of(exported, "convert").counts
    assert counts["layers_compared"] == LAYERS and counts["tensors_compared"] == LAYERS * 9 + 3
    assert 0 < counts["transformers_logit_error"] <= 10 * counts["single_precision_logit_error"]


@pytest.mark.slow
def test_two_ranks_evaluate_what_neither_could_hold(exported):
    """The limit decides by itself that the weights are sharded. That results are those of one process is a test of the
    stage's own."""
    whole = limited("evaluate", EVALUATE_MB, exported, "evaluate.dp_shard=1")
    assert whole.returncode != 0 and "allocate memory" in whole.stderr, whole.stdout + whole.stderr
    ended = limited("evaluate", EVALUATE_MB, exported, ranks=2)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "weights sharded over 2 ranks (FSDP2, all-gathered block by block)" in ended.stdout
    assert manifest_of(exported, "evaluate").counts["dp_shard"] == 2
    results = read_json(exported.parent / "runs/mini/evaluate/results.json")
    assert [entry["tokens"] for entry in results["continuations"]] == [3, 3]
