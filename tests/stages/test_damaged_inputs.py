"""A bit that flips in what a stage reads, size and time being as they were: the stage stops by name, and goes on once
it is mended, as if nothing had been."""

import os
from contextlib import contextmanager

import pytest

import drover.pipeline.contract.inputs
from drover.pipeline.config.loading import load_config
from drover.pipeline.contract.manifest import read_manifest
from drover.pipeline.contract.state import read_state
from drover.pipeline.core.files import Ledger
from drover.pipeline.data.remote_tokens import upload_shards
from drover.pipeline.records.checkpoints import complete_checkpoints
from drover.pipeline.records.metrics import read_metrics
from drover.pipeline.storage.store import Store
from drover.pipeline.training.uploads import CopiedCheckpoints
from tests.stages.here import run_here
from tests.stages.small_run import item, write_task
from tests.stages.training import copy_run, curve, manifest_of, proven, run_train, train_folder, weights
from tests.waiting import wait_for


@pytest.fixture(scope="module")
def chain(tmp_path_factory, two_sources):
    """Configuration of a run of one process whose stages up to encode are done."""
    folder = tmp_path_factory.mktemp("chain")
    write_task(folder, "words", *(item(number, 0) for number in range(4)))
    return copy_run(two_sources, folder, launch={"processes": 1}, train={"prompts": [], "sample_every": 100},
                    evaluate={"tasks": ["words"], "task_folders": [str(folder)], "prompts": []})


@contextmanager
def flipped(path, at=None, bit=0):
    """One bit of the file is another one, in the middle or at a byte; size and time are not."""
    stat, whole = path.stat(), path.read_bytes()
    changed = bytearray(whole)
    changed[len(whole) // 2 if at is None else at] ^= 1 << bit

    def write(data):
        path.write_bytes(data)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    write(changed)
    try:
        yield path
    finally:
        write(whole)


@pytest.fixture
def refused(run):
    """Function: that a stage stops and names the file, in one sentence on the console and in its record."""
    def check(config, stage, path, *arguments):
        output = run(stage, config, *arguments, expect=2).err
        assert output.count("stops here") == 1
        assert str(path) in output and " -> " in output and "continues" in output
        state = read_state(load_config(config, [text for text in arguments if "=" in text]).folder / stage)
        assert state.status == "failed" and str(path) in state.reason
    return check


def reusing(config, name):
    return f"name={name}", f"reuse={config.parent}/runs/mini"


@pytest.mark.parametrize(("stage", "reads"), [
    ("tokenizer", [("shard/train/*.tar", 3), ("shard/validation/*.tar", 700), ("shard/train/*.tar", -1)]),
    ("encode", [("shard/train/*.tar", -1), ("tokenizer/report.json", None)])])
def test_text_shards_and_a_vocabulary(chain, refused, stage, reads):
    """Wherever in it: the name of a member, text, padding, and a file of the vocabulary's that encode does not need."""
    here = reusing(chain, f"{stage}-again")
    for pattern, at in reads:
        with flipped(min((chain.parent / "runs/mini").glob(pattern)), at) as path:
            refused(chain, stage, path, "--force", *here)
    assert run_here(stage, chain, *here) == 0
    assert manifest_of(chain, stage, f"{stage}-again").digest == manifest_of(chain, stage).digest


@pytest.fixture(scope="module")
def trained(chain):
    """The run of `chain` with train and convert done, never disturbed."""
    assert run_here("train", chain) == run_here("convert", chain) == 0
    return chain


def test_a_token_shard_and_training_continues_as_if_nothing_had_been(trained, refused, monkeypatch, tmp_path):
    """Found after steps that read the damage, before the first checkpoint of them appears, here or in a store."""
    path = max((trained.parent / "runs/mini/encode/train").glob("*.arrow"))
    store, name = Store(f"file://{tmp_path}/store"), "copied"
    here = *reusing(trained, name), f"train.checkpoint.copy_to={store.url}"
    folder = train_folder(trained, name)
    with monkeypatch.context() as patch, flipped(path):
        hold_back(patch, lambda: list(folder.glob("checkpoints/step-*.tmp")))
        refused(trained, "train", path, *here)
    assert "There is no checkpoint yet." in read_state(folder).reason
    assert not CopiedCheckpoints(store).list().complete and not complete_checkpoints(folder)
    assert manifest_of(trained, name=name) is None and len(read_metrics(folder / "metrics.jsonl")) > 0
    assert run_here("train", trained, *here) == 0
    assert curve(trained, name) == curve(trained) and weights(trained, name) == weights(trained)
    assert CopiedCheckpoints(store).list().complete[-1:] == [12] and proven(trained, name)


def hold_back(patch, ready):
    """Let the hashing of token shards begin when `ready()`: checkpoints wait for it."""
    compared = drover.pipeline.contract.inputs._problem

    def late(file):
        wait_for(ready)
        return compared(file)
    patch.setattr(drover.pipeline.contract.inputs, "_problem", late)


@pytest.mark.slow
def test_what_was_saved_before_a_later_start_stays(trained, refused):
    """That start compared all shards that it read. The message names its checkpoint."""
    here, folder = reusing(trained, "again"), train_folder(trained, "again")
    assert run_here("train", trained, *here, "train.steps=6") == 0
    path = min((trained.parent / "runs/mini/encode/train").glob("*.arrow"))
    with flipped(path):
        refused(trained, "train", path, *here, "--accept-changes")
        assert f"The newest checkpoint is {folder}/checkpoints/step-00000006." in read_state(folder).reason
        assert [step.name for step in complete_checkpoints(folder)][-1] == "step-00000006"
        assert run_here("train", trained, *here, "--accept-changes", "train.shard_checks=false") == 0


@pytest.mark.slow
def test_a_downloaded_shard_that_is_damaged_on_its_node(trained, refused, tmp_path):
    """The steps read it, not the stage's own file."""
    encode, url = trained.parent / "runs/mini/encode", f"file://{tmp_path}/store"
    upload_shards(encode, read_manifest(encode).outputs, url)
    here = (*reusing(trained, "downloaded"), f"train.tokens_from={url}", f"train.tokens_folder={tmp_path}/node")
    assert run_here("train", trained, *here, "train.steps=6") == 0
    path = max((tmp_path / "node").rglob("train/*.arrow"))
    with flipped(path):
        refused(trained, "train", path, *here, "--accept-changes")
    path.unlink()
    assert run_here("train", trained, *here, "--accept-changes") == 0


def test_all_ranks_leave_together_with_one_sentence(trained):
    """The rank that finds it is not the one that speaks: the first one hashes every other shard, from the first on."""
    shards = [record["path"] for record in manifest_of(trained, "encode").outputs if record["split"] == "train"]
    with flipped(trained.parent / "runs/mini/encode" / shards[1]) as path:
        output = run_train(trained, *reusing(trained, "two"), "launch.processes=2", ranks=2, expect=2).stderr
    assert output.count("stops here") == 1 and str(path) in output
    assert str(path) in read_state(train_folder(trained, "two")).reason


@pytest.mark.slow
def test_what_convert_and_evaluate_read(trained, refused):
    """A checkpoint, vocabulary and validation tokens; then the export, validation text and tokens, vocabulary."""
    run = trained.parent / "runs/mini"
    before = manifest_of(trained, "convert").digest
    for name in ("train/checkpoints/step-00000012/rank-00000.safetensors", "tokenizer/hf/tokenizer.json",
                 "encode/validation/more-00000.arrow"):
        with flipped(run / name) as path:
            refused(trained, "convert", path, "--force")
    assert run_here("convert", trained) == 0
    assert manifest_of(trained, "convert").digest == before

    def interrupt(work):
        raise KeyboardInterrupt
    assert run_here("evaluate", trained, body=interrupt) == 130
    for name in ("convert/hf/model-00001-of-00001.safetensors", "shard/validation/code-00000.tar",
                 "encode/validation/more-00000.arrow", "tokenizer/vocabulary.json"):
        with flipped(run / name) as path:
            refused(trained, "evaluate", path)
        assert not list(Ledger(run / "evaluate/units/measured").lines()), "what was measured of damaged inputs counts"
    assert run_here("evaluate", trained) == 0
