"""Why a job waits, in words that help."""

import pytest

from drover.launch.slurm.wait_reasons import is_stuck, meaning, refusal
from tests.refusal import table

DOWN = "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions"
ACCOUNT = "Job's account not permitted to use this partition (debug allows physics not chemistry)"
QOS = "Job's QOS not permitted to use this partition (short allows high not normal)"
WORDS = table(f"""
    ReqNodeNotAvail, UnavailableNodes:n[3-4] -> down, drained or reserved (n[3-4]); it starts when
    ReqNodeNotAvail, Reserved for maintenance -> a shorter launch.train.time may let it start before
    {DOWN} -> down, drained or reserved; it starts
    {DOWN.replace(" ", "_")} -> down, drained or reserved; it starts
    ({DOWN[:58]} -> down, drained or reserved; it starts
    NodeDown -> down, drained
    Resources -> waits for free nodes
    Priority -> other jobs are ahead
    PartitionNodeLimit -> more nodes than the partition allows
    PartitionTimeLimit -> launch.time
    BadConstraints -> no nodes of the partition fit its request
    PartitionDown -> its partition takes no jobs
    PartitionInactive -> its partition takes no jobs
    AssocGrpNodeLimit -> the account's jobs have reached
    AssocGrpCPUMinutesLimit -> the budget
    AssocMaxJobsLimit -> the account's jobs have reached
    AssocMaxNodePerJobLimit -> more than the account allows for one job
    AssociationJobLimit -> the account's jobs have reached
    QOSMaxJobsPerUserLimit -> your jobs have reached
    QOSMaxNodePerJobLimit -> one job
    QOSMinGRES -> one job
    QOSMaxWallDurationPerJobLimit -> one job
    QOSGrpNodeLimit -> the jobs of its quality of service
    QOSGrpCPUMinutesLimit -> the budget
    QOSUsageThreshold -> the budget
    QOSNotAllowed -> unknown or forbidden
    InvalidQOS -> launch.qos
    InvalidAccount -> launch.account
    AccountNotAllowed -> launch.account
    DependencyNeverSatisfied -> a job that it waits for failed
    BeginTime -> after about two minutes
    JobHeldUser -> `scontrol release 12`
    JobHeldAdmin -> held by the administrators
    JobHoldMaxRequeue -> as often as the site allows
    launch failed requeued held -> `scontrol release 12`
    launch_failed_requeued_held -> `scontrol release 12`
    Licenses -> licenses
    Reservation -> its reservation to begin
    ReservationDeleted -> no longer exists
    BurstBufferResources -> burst buffer
    Cleaning -> being prepared
    Prolog -> being prepared
    JobLaunchFailure -> could not be started
    SystemFailure -> could not be started
    {ACCOUNT} -> launch.account
    {QOS} -> launch.qos
    QOSMaxCpuPerUserLimit -> never if it alone requests more
    SomethingNew -> waits; Slurm gives the reason SomethingNew, which `scontrol show job 12`""")
STUCK = {"PartitionNodeLimit", "PartitionTimeLimit", "BadConstraints", "AssocMaxNodePerJobLimit",
         "QOSMaxNodePerJobLimit", "QOSMinGRES", "QOSMaxWallDurationPerJobLimit", "QOSNotAllowed", "InvalidQOS",
         "InvalidAccount", "AccountNotAllowed", ACCOUNT, QOS, "DependencyNeverSatisfied", "ReservationDeleted"}


@pytest.mark.parametrize("reason, words", WORDS)
def test_reasons_in_plain_words(reason, words):
    for several in (False, True):
        message = meaning(reason, "12", several=several)
        assert words in message and "{" not in message
    assert is_stuck(reason) == (reason in STUCK)


FAILED = "sbatch: error: Batch job submission failed: "


@pytest.mark.parametrize("message, advice", table("""
    Node count specification invalid -> --nodes
    Memory required by task is not available -> launch.mem
    Requested time limit is invalid (missing or exceeds some limit) -> launch.time
    Invalid account or account/partition combination specified -> launch.account
    Invalid qos specification -> launch.qos
    Invalid feature specification -> launch.constraint
    Required partition not available (inactive or drain) -> launch.partition
    Job violates accounting/QOS policy (job submit limit, user's size and/or time limits) -> --stage
    Requested node configuration is not available -> mem, cpus
    Invalid generic resource (gres) specification -> gpu_type"""))
def test_refusals_of_sbatch_name_the_settings(message, advice):
    why, what_to_do = refusal(FAILED + message, "")
    assert why == f"Batch job submission failed: {message}" and advice in what_to_do


def test_what_a_site_says_of_its_rules_is_kept():
    message, advice = refusal(f"sbatch: error: Name a project. See https://a.org\n{FAILED}Unspecified error\n", "")
    assert message == "Name a project. See https://a.org; Batch job submission failed: Unspecified error"
    assert "launch.extra" in advice and refusal("sbatch: error: no", "what?") == ("no", "what?")
