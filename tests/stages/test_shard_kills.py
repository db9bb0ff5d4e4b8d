"""kill -9 all over the passes of the shard stage, with another number of processes each time."""

import itertools
import signal

import pytest

from pipeline.contract.manifest import read_manifest
from tests.conftest import run_stage
from tests.cut_off import cut_off_stage
from tests.dirty_corpus import every_pass, write_dirty
from tests.stages.test_shard import folder_of, write_config


@pytest.mark.parametrize("base", [pytest.param(2.0, marks=pytest.mark.slow), pytest.param(1.1, marks=pytest.mark.soak)])
def test_killed_all_over_its_passes_it_ends_with_the_same_bytes(tmp_path, base):
    """Before a change of files whose number is a power of the base: first it is killed often where it begins, then far
    on its way. Each start goes on from what the killed one before it left. A worker that dies ends the stage too."""
    write_dirty(tmp_path, size=2)
    config = write_config(tmp_path, **every_pass(tmp_path))
    run_stage("shard", config)
    ends = []
    for number in itertools.takewhile(lambda _: 0 not in ends, itertools.count()):
        ends.append(cut_off_stage("shard", int(base ** number), "--config", str(config), "name=killed",
                                  f"launch.processes={1 + number % 3}")[0])
    assert len(ends) > 6 and {0, -signal.SIGKILL} <= set(ends) <= {0, 2, -signal.SIGKILL}
    one, other = (read_manifest(folder_of(config, name)) for name in ("a", "killed"))
    assert (one.outputs, one.counts, one.fingerprint) == (other.outputs, other.counts, other.fingerprint)
    killed = folder_of(config, "killed")
    assert not (killed / "staging").exists() and not list(killed.parent.rglob("*.tmp"))
