"""Phases, packed or not, with token shards and checkpoints in a store, a lost machine, damage,
rollbacks and skipped steps: what one option promises holds with the others, and the run equals the plain one to the
last bit. tests/test_data_page.py has the sources in a store, too."""

import shutil

import pytest

from drover.pipeline.contract.manifest import read_manifest
from drover.pipeline.data.remote_tokens import upload_shards
from drover.pipeline.records.metrics import read_metrics
from drover.pipeline.storage.store import Store
from drover.pipeline.training.uploads import CopiedCheckpoints
from tests.object_store import SECRET
from tests.stages.here import run_here
from tests.stages.training import (
    copy_run,
    events,
    proven,
    reusing,
    run_with_faults,
    train_folder,
    weights,
)

PHASES = [{"until": 6144, "sequence_length": 32, "mixture": {"code": 1, "more": 0}},
          {"until": 18432, "sequence_length": 128, "batch_tokens": 2048, "lr": 0.005}]
"""Six steps on one source, six longer and larger ones on two."""
FAULTS = "spike:rank=0,step=6,factor=60;nan:rank=1,step=8;spike:rank=0,step=12,factor=60"
"""That rollbacks leave samples out for, and steps are skipped for."""
SETTINGS = ["train.steps=null", f"train.phases={PHASES}", "train.guards.spike=rollback",
            "train.guards.spike_min_history=4"]
OPTIONS = {"phases": SETTINGS, "packed-phases": [*SETTINGS, "train.packing=best_fit"]}


@pytest.fixture(scope="module")
def short_documents(tmp_path_factory, two_sources):
    """Config of a run of its own with token shards from two sources, which may be damaged, and a copy of them."""
    config = copy_run(two_sources, tmp_path_factory.mktemp("crossed"), train={"mixture": {"code": 3, "more": 1}})
    assert run_here("encode", config, "launch.processes=1", "--force",
                    f"encode.copy_to=file://{config.parent}/store") == 0
    return config


def train_from_files(short_documents, option):
    """Train with an option, nothing else being set."""
    run_with_faults(short_documents, FAULTS, f"name={option}", f"reuse={short_documents.parent}/runs/mini",
                    *OPTIONS[option], ranks=2)
    assert proven(short_documents, option)
    assert events(short_documents, "rollback", option) and events(short_documents, "skip", option)
    if option == "phases":  # rolled back in the last step of each: no token is lost or comes twice
        assert [(sum(phase["left_out"].values()), sum(phase["tokens"].values())) for phase in read_manifest(
            train_folder(short_documents, option)).counts["phases"]] == [(1024, 6144), (2048, 12288)]


@pytest.fixture
def fresh(tmp_path, short_documents):
    """Config of a new run that reuses the shards."""
    return reusing(short_documents, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("option", "lost"), [("phases", True), ("packed-phases", False)])
def test_with_shards_and_checkpoints_in_stores_it_is_as_from_files(fresh, short_documents, tmp_path, seaweed, option,
                                                                   lost):
    """Killed on the way, its folder and the downloaded shards lost or not, and with rollbacks."""
    url, tokens, run = seaweed.url_of("checkpoints"), seaweed.url_of("tokens"), fresh.parent / "runs/mini"
    encode = short_documents.parent / "runs/mini/encode"
    upload_shards(encode, read_manifest(encode).outputs, tokens)
    settings = [*OPTIONS[option], f"train.tokens_from={tokens}", f"train.tokens_folder={tmp_path}/node",
                "train.checkpoint.background=false", f"train.checkpoint.copy_to={url}"]
    late = ";slow:rank=1,step=9,seconds=10" * lost  # so that the copy of step 8 is there, without what step 9 brings
    run_with_faults(fresh, f"{FAULTS}{late};kill:rank=1,step=11", *settings, ranks=2, expect=1)
    if lost:  # what happened after the last copy happens again
        shutil.rmtree(run / "train")
        shutil.rmtree(tmp_path / "node")
    output = run_with_faults(fresh, FAULTS, *settings, ranks=2)
    assert "Traceback" not in output.stderr and ("fetching step-000000" in output.stdout) == lost
    assert SECRET not in output.stdout + "".join(path.read_text() for path in run.rglob("*") if path.suffix in (
        ".json", ".jsonl", ".yaml"))
    result = CopiedCheckpoints(Store(url)).list()
    assert len(result.complete) > 1 and not result.unfinished
    train_from_files(short_documents, option)
    assert metrics(run) == metrics(short_documents.parent / "runs" / option)
    assert weights(fresh) == weights(short_documents, option) != [] and proven(fresh)
    assert ("token shards to" in output.stdout) == lost


TIMES = {"tokens_per_s", "step_s", "data_wait_s", "memory_mb", "time", "train_s", "goodput", "look_s", "mfu"}


def metrics(run):
    """What a run measured, but for times."""
    return [{name: value for name, value in line.items() if name not in TIMES}
            for line in read_metrics(run / "train/metrics.jsonl")]
