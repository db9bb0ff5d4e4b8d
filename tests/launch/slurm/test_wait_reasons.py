"""Why a job waits, in words that help."""

from __future__ import annotations

import pytest

from drover.launch.slurm.wait_reasons import is_stuck, meaning

DOWN = "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions"
WORDS = [
    ("ReqNodeNotAvail, UnavailableNodes:n[3-4]", "down, drained or reserved (n[3-4]); it starts by itself"),
    ("ReqNodeNotAvail, Reserved for maintenance", "a shorter launch.train.time may let it start before"),
    (DOWN, "down, drained or reserved; it starts"), (DOWN.replace(" ", "_"), "down, drained or reserved; it starts"),
    ("(" + DOWN[:58], "down, drained or reserved; it starts"),
    ("Resources", "waits for free nodes"), ("PartitionNodeLimit", "more nodes than the partition allows"),
    ("PartitionTimeLimit", "launch.time"), ("PartitionInactive", "its partition takes no jobs"),
    ("BadConstraints", "no nodes of the partition are as it asks"), ("AssocGrpNodeLimit", "the account's jobs use all"),
    ("AssocGrpCPUMinutesLimit", "the budget"), ("AssocMaxNodePerJobLimit", "more than the account may use in one job"),
    ("QOSMaxJobsPerUserLimit", "your jobs use all"), ("QOSMaxNodePerJobLimit", "one job"), ("QOSMinGRES", "one job"),
    ("QOSGrpNodeLimit", "the jobs of its quality of service"), ("QOSUsageThreshold", "the budget"),
    ("QOSNotAllowed", "may not be used here"), ("AccountNotAllowed", "launch.account"),
    ("DependencyNeverSatisfied", "a job that it waits for ended badly"), ("BeginTime", "after about two minutes"),
    ("JobHeldUser", "`scontrol release 12`"), ("launch_failed_requeued_held", "`scontrol release 12`"),
    ("Reservation", "its reservation to begin"), ("ReservationDeleted", "does not exist"),
    ("SomethingNew", "waits for a reason that Slurm calls SomethingNew; `scontrol show job 12`")]
STUCK = {"PartitionNodeLimit", "PartitionTimeLimit", "BadConstraints", "AssocMaxNodePerJobLimit",
         "QOSMaxNodePerJobLimit", "QOSMinGRES", "QOSNotAllowed", "AccountNotAllowed", "DependencyNeverSatisfied",
         "ReservationDeleted"}


@pytest.mark.parametrize(("reason", "words"), WORDS)
def test_reasons_in_plain_words(reason, words):
    for several in (False, True):
        said = meaning(reason, "12", several=several)
        assert words in said and "{" not in said
    assert is_stuck(reason) == (reason in STUCK)
