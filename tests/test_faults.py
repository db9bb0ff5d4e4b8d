"""What crosses the stages: kill -9 anywhere in the chain, and a disk that fills up in any stage that writes data."""

import os
import random
import resource
import shutil
import signal
import subprocess
import sys
from contextlib import suppress

import pytest

from drover.pipeline.contract.manifest import read_manifest
from drover.pipeline.contract.stages import STAGES
from drover.pipeline.contract.state import read_attempts
from tests.conftest import REPOSITORY, environment, run_python, slow, start_stage, write_config
from tests.cut_off import cut_off_stage
from tests.faulty import HOOKS
from tests.stages.training import changed, curve, kill
from tests.waiting import HANG_S, wait_for

SAME_BYTES = ("shard", "tokenizer", "encode", "convert", "evaluate")
"""Stages whose outputs hold nothing that a clock measured."""

RANKS = {"train": 2}


def run_here(stage, config, *overrides, expect=0, **options):
    """Run a stage in a warm process; what it said."""
    process = start_stage(stage, config, *overrides, **options)
    output = "".join(process.communicate(HANG_S))
    assert process.wait() == expect, output
    return output


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, corpus):
    """Config of a run of all stages that nobody disturbed, in the processes of the launcher's local chain."""
    config = write_config(tmp_path_factory.mktemp("undisturbed"), corpus)
    for stage in STAGES:
        run_here(stage, config, "launch.processes=1", ranks=RANKS.get(stage, 1))
    return config


@pytest.fixture
def before(tmp_path, undisturbed):
    """Function: config of another run that is at the same point as the undisturbed one before a stage."""
    def make(stage):
        for earlier in list(STAGES)[:list(STAGES).index(stage)]:
            shutil.copytree(undisturbed.parent / "runs/mini" / earlier, tmp_path / "runs/mini" / earlier)
        return changed(undisturbed, tmp_path, {})
    return make


def assert_same(config, undisturbed, *stages):
    """Outputs of two runs are the same bytes, and their losses the same to the last bit; nothing half-made is left."""
    ours, theirs = config.parent / "runs/mini", undisturbed.parent / "runs/mini"
    for stage in stages:
        if stage in SAME_BYTES:
            assert read_manifest(ours / stage).digest == read_manifest(theirs / stage).digest, stage
        assert not list((ours / stage).rglob("*.tmp"))
    if "train" in stages:
        assert curve(config) == curve(undisturbed)
    if "report" in stages:
        assert (ours / "report.html").is_file() and (ours / "report/manifest.json").is_file()


@pytest.mark.parametrize("stage", ["shard", "encode", "train", *slow("tokenizer", "convert", "evaluate", "report")])
def test_a_stage_killed_before_its_1st_2nd_4th_8th_change_of_files_ends_with_the_same_outputs(stage, before,
                                                                                               undisturbed):
    """Each start goes on from what the killed one before it left."""
    config, ranks, ends = before(stage), RANKS.get(stage, 1), []
    while 0 not in ends and len(ends) < 12:
        status, output = cut_off_stage(stage, 2 ** len(ends), "--config", str(config), "launch.processes=1",
                                       ranks=ranks)
        ends.append(status)
    assert len(ends) > 4 and set(ends) == {0, -signal.SIGKILL if ranks == 1 else 1}, (ends, output)
    assert_same(config, undisturbed, stage)


def files(run):
    """How many files a run has: it grows from the first stage to the last, so it tells how far a chain has come."""
    return sum(len(names) for _, _, names in os.walk(run))  # which passes over folders that vanish meanwhile


@pytest.mark.parametrize("seed, kills", [pytest.param(0, 4, marks=pytest.mark.slow),
                                         pytest.param(1, 100, marks=pytest.mark.soak)])
def test_kill_9_anywhere_in_the_chain_changes_nothing(tmp_path, corpus, undisturbed, seed, kills):
    """The launcher and everything below it is killed at random moments; the same command continues each time.

    A moment is a number of files that the run has more by then, and up to a second after that. A chain that comes to
    its end is compared, and another run is begun.
    """
    chance, most = random.Random(seed), 2 * files(undisturbed.parent / "runs/mini") // min(kills, 16)
    landed, config = 0, None
    while landed < kills or config is not None:
        if config is None:
            (folder := tmp_path / f"after-{landed}").mkdir()
            config = write_config(folder, corpus)
        run = config.parent / "runs/mini"
        process = subprocess.Popen(
            [sys.executable, "launch/submit.py", "--stage", "all", "--config", str(config), "--cluster", "local"],
            cwd=REPOSITORY, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        if landed < kills:
            moment, late = files(run) + chance.randrange(most), chance.random()
            wait_for(lambda run=run, moment=moment, process=process: files(run) >= moment or process.poll() is not None)
            with suppress(subprocess.TimeoutExpired):
                process.wait(late)
            kill(process)
        if (status := process.wait(HANG_S)) == -signal.SIGKILL:
            landed += 1
            print(f"{landed} kills, at {files(run)} files", flush=True)
            continue
        assert status == 0
        assert_same(config, undisturbed, *STAGES)
        config = None


def test_a_killed_rank_on_one_box_is_started_again_and_changes_nothing(before, undisturbed):
    config = before("train")
    ended = run_python("launch/submit.py", "--stage", "train", "--config", config, "--cluster", "local",
                       f"train.hooks={HOOKS}", check=False, DROVER_FAULTS="kill:rank=1,step=7")
    assert ended.returncode == 0 and "killed by SIGKILL; starting again" in ended.stderr, ended.stderr
    assert_same(config, undisturbed, "train")
    events = [event for event in read_attempts(config.parent / "runs/mini") if event["event"] in ("attempt", "ended")]
    assert [(event["start"], event.get("status"), event.get("from"), event.get("step")) for event in events] == [
        (0, None, None, None), (0, "crashed", None, 4), (1, None, 4, None), (1, "done", None, 12)]


@pytest.mark.parametrize("stage, limit", [
    ("shard", 20_000), ("convert", 50_000), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("tokenizer", 10_000), ("encode", 5_000), ("evaluate", 3_000), ("report", 3_000)))])
def test_a_full_disk_stops_any_stage_with_a_paragraph(before, undisturbed, stage, limit):
    """The process's file size limit stands in for the disk. Once there is room, the same command goes on."""
    config = before(stage)
    workers = f"launch.processes={1 + (stage == 'shard')}"
    output = run_here(stage, config, workers, expect=2, limits={resource.RLIMIT_FSIZE: limit})
    assert "full" in output and f"{config.parent}/runs/mini/" in output, "the file is named"
    assert read_manifest(config.parent / "runs/mini" / stage) is None
    run_here(stage, config, workers)
    assert_same(config, undisturbed, stage)
