"""Stages done in parts: several processes at once, as on several nodes, make what one makes, and nothing twice."""

import os
import signal
from collections import Counter

import pytest

from drover.pipeline.contract import locks
from drover.pipeline.contract.entry import stage_main
from drover.pipeline.contract.manifest import read_manifest
from drover.pipeline.contract.run import done_parts
from drover.pipeline.contract.state import read_state
from drover.pipeline.contract.tasks import Ledger
from drover.pipeline.core.files import read_json
from drover.pipeline.shard import shard
from tests.contract.conftest import ended
from tests.refusal import table
from tests.stand_ins import run_of
from tests.waiting import wait_for


def test_parts_forced_together_start_afresh_once_and_one_that_comes_later_joins(twelve):
    twelve.run()
    (twelve.folder / "old.txt").touch()
    twelve.log.unlink()
    forced = ("--force-id", "chain-7")
    first, second = (twelve.start("--part", f"{index}/3", *forced, held=4) for index in range(2))
    twelve.wait_for(first, 6)
    twelve.wait_for(second, 4)
    (twelve.folder / "9.txt.other-node-1.tmp").touch()  # what another part may be writing
    twelve.run("--part", "2/3", *forced)
    assert (twelve.folder / "9.txt.other-node-1.tmp").exists() and not (twelve.folder / "old.txt").exists()
    assert "is in use by" in twelve.run("--part", "2/3", "--force-id", "chain-8", status=2)
    twelve.gate.touch()
    ended(first)
    ended(second)
    assert read_json(twelve.folder / "started.json")["force_id"] == "chain-7"
    assert len(twelve.records()) == 12 and read_manifest(twelve.folder) is None
    twelve.run("--part", "0/3", *forced)  # as after a requeue
    twelve.run(*forced)
    for arguments in (forced, ("--part", "2/3", *forced), ()):
        assert "up to date" in twelve.run(*arguments)
    assert twelve.units() == Counter(range(12)) and not list(twelve.folder.rglob("*.tmp"))


def test_part_and_whole_and_two_cuts_exclude_each_other_and_a_killed_part_goes_on_with_its_share(twelve):
    part = twelve.start("--part", "0/2", held=4, SLURM_JOB_ID="4711")
    twelve.wait_for(part, 4)
    for arguments in ([], ["--force"], ["--part", "0/2"], ["--part", "1/3"]):
        assert f"in use by process {part.pid} on {os.uname().nodename}, Slurm job 4711" in \
            twelve.run(*arguments, status=2)
    assert read_state(twelve.folder) is None
    other = twelve.start("--part", "1/2", held=4)
    twelve.wait_for(other, 5)
    part.kill()
    assert part.wait() == -signal.SIGKILL
    before = twelve.records()
    assert sorted(before) == [0, 1, 2, 3]
    assert "part 0/2" in twelve.run("--part", "0/2")  # while the other is at work
    twelve.gate.touch()
    ended(other)
    markers = {name: (marker["units"], marker["found"])
               for name, _, marker in Ledger(twelve.folder / "units/parts").lines()}
    assert markers == {"read.0-of-2": (6, 2), "read.1-of-2": (6, 0)}
    twelve.gate.unlink()
    whole = twelve.start(AFTER="1")
    twelve.wait_for(whole, None)
    assert f"in use by process {whole.pid}" in twelve.run("--part", "0/2", status=2)
    assert read_state(twelve.folder).status == "running"
    twelve.gate.touch()
    ended(whole)
    started = twelve.units()
    del started[None]
    assert started == Counter([*range(12), 4]), "only the unit that was being done is done again"
    assert before.items() <= twelve.records().items()
    assert read_manifest(twelve.folder)


def test_starts_follow_each_other(twelve):
    (twelve.folder.parent / ".locks").mkdir(parents=True)
    held = locks.lock(twelve.folder.parent, "shard.start")
    part = twelve.start("--part", "0/2")
    wait_for(lambda: f"waits while process {os.getpid()}" in part.printed(), of=part)
    assert not twelve.folder.exists()
    held.close()
    ended(part)
    assert len(twelve.records()) == 6


def test_parts_of_a_corrected_input_start_afresh_together(twelve):
    for index in range(2):
        assert "Latin-1" in twelve.run("--part", f"{index}/2", status=2, REFUSE="1")
    assert read_state(twelve.folder) is None
    (twelve.folder / "left.txt").touch()
    for part in [twelve.start("--part", f"{index}/2", "shard.validation_share=0.5") for index in range(2)]:
        ended(part)
    twelve.run("shard.validation_share=0.5")
    assert twelve.units() == Counter(range(12)) and not (twelve.folder / "left.txt").exists()


def test_parts_of_other_settings_are_not_done(twelve):
    """There may be more parts than units."""
    for index in (11, 12):
        twelve.run("--part", f"{index}/13")
    assert list(twelve.records()) == [11]

    def done(*overrides, parts=13):
        return done_parts(run_of(twelve.place, *overrides), "shard", parts, "read")
    assert done() == done("launch.processes=2") == {11, 12}
    assert done(parts=2) == done("shard.validation_share=0.5") == done("name=b") == set()
    (twelve.place / "corpus.txt").write_text("other text\n")
    assert done() == set()


@pytest.mark.parametrize(("stage", "arguments", "told"), table("""
    shard -> --part 2/2 -> --part 2/2 is not a part
    shard -> --part=-1/2 -> --part -1/2 is not
    shard -> --part one -> --part one is not
    shard -> --part 0/2 --force -> --force-id
    tokenizer -> --part 0/2 -> cannot be done in parts; shard, encode can""", str, str.split))
def test_what_is_no_part_is_refused(place, capsys, stage, arguments, told):
    assert stage_main(stage, shard, ["--config", str(place / "c.yaml"), *arguments]) == 2
    assert told in capsys.readouterr().err and not (place / "runs").exists()
