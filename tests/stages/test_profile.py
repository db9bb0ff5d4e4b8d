"""Where time and memory go: steps that are profiled, and what is said where memory does not suffice."""

import gzip
import json
import shlex

import pytest

from drover.pipeline.training.profiling import ROWS
from drover.tools.rehearse import main as rehearse
from drover.tools.verify import main as verify
from tests.stages.training import curve, run_train, run_with_faults, train_folder

STEPS = "train.steps=6"


def test_profiled_steps_leave_traces_of_the_ranks_that_are_named_and_change_nothing(fresh):
    profile = ["train.profile.start=3", "train.profile.steps=2", STEPS]
    output = run_train(fresh, *profile, "train.profile.ranks=[0, 1]", ranks=2).stdout
    folder = train_folder(fresh) / "profile"
    assert f"profiled 2 steps up to step 4: {folder}" in output
    assert len(list(folder.iterdir())) == 4
    for rank in (0, 1):
        trace = json.loads(gzip.decompress((folder / f"steps-3-4.rank{rank}.trace.json.gz").read_bytes()))
        names = [event["name"] for event in trace["traceEvents"]]
        assert sum(name.startswith("ProfilerStep#") for name in names) == 2
        assert any("all_reduce" in name for name in names) and "aten::mm" in names
        table = (folder / f"steps-3-4.rank{rank}.operations.txt").read_text().splitlines()
        operations = [line[:len(table[0].split()[0])].strip() for line in table[3:-2]]
        assert len(operations) == ROWS and len(set(operations) & set(names)) > ROWS / 2
    run_train(fresh, "name=plain", STEPS, ranks=2)
    assert curve(fresh) == curve(fresh, "plain")
    assert verify(["--run", str(fresh.parent / "runs/mini")]) == 0


def test_want_of_memory_is_explained_and_ends_the_job_only_in_the_first_step_of_a_start(fresh):
    first = run_with_faults(fresh, "memory:rank=0,step=1", "train.steps=4", expect=2)
    assert "Traceback" not in first.stderr
    for part in ("The memory of rank 0's device did not suffice in step 1 (DROVER_FAULTS asks for it)", "of weights, ",
                 "of optimizer's states; the rest", "The largest by module: ", "--ranks 1 --memory <GB of a GPU>"):
        assert part in first.stderr
    _, _, command = first.stderr.partition("drover rehearse ")
    assert rehearse(shlex.split(command.splitlines()[0].replace("<GB of a GPU>", "80"))) == 0
    later = run_with_faults(fresh, "memory:rank=0,step=3", "train.steps=4", expect=1)
    assert "did not suffice in step 3" in later.stderr and "OutOfMemoryError" in later.stderr


@pytest.mark.slow
def test_a_profile_that_training_ends_before_is_missed_aloud(fresh):
    output = run_train(fresh, STEPS, "train.profile.start=7").stdout
    assert ("train.profile: training ended after 6 steps of this start, before the 9 that were to be done; no "
            "profile is written") in output and not (train_folder(fresh) / "profile").exists()
