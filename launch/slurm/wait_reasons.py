"""What Slurm's reasons for a waiting job mean to its user, and what can be done (JOB REASON CODES of `man squeue`)."""

from __future__ import annotations

import re

EXPECTED = ("", "None", "Dependency", "JobArrayTaskLimit", "Singleton")
"""Reasons that need no word: the job waits as it should."""
FEWER = "; sooner, the same command with fewer --nodes goes on, after --cancel"
SHORTER = "a shorter launch.train.time may let it start before"
NODES_GONE = "waits for nodes that are down, drained or reserved{nodes}; it starts by itself when they are back{fewer}"
UNAVAILABLE = re.compile(r"UnavailableNodes:\s*([^)\s]+)")
REASONS = (
    ("BeginTime", "was queued again, or may not begin yet; Slurm starts a requeued job after about two minutes"),
    ("DependencyNeverSatisfied", "will never run: a job that it waits for ended badly"),
    ("Resources", "waits for free nodes{fewer}"),
    ("Priority", "waits: other jobs are ahead of it"),
    ("JobHeldUser", "is held; `scontrol release {job}` lets it go"),
    ("JobHeldAdmin", "is held by the administrators; ask them, only they can release it"),
    (r"JobHoldMaxRequeue|MaxRequeue", "was queued again as often as the site allows (MaxBatchRequeue) and is held; "
                                      "`scontrol release {job}`, or `drover cancel` and the same command, goes on"),
    ("launch failed requeued held", "could not be started and is held; `scontrol release {job}` lets it try again"),
    ("PartitionNodeLimit", "will never run: it asks for more nodes than the partition allows; the same command with "
                           "fewer --nodes, or another launch.partition, after --cancel"),
    ("PartitionTimeLimit", "will never run: it asks for more time than the partition allows (launch.time)"),
    ("PartitionDown|PartitionInactive", "waits: its partition takes no jobs now; it starts by itself when the "
                                        "administrators open it, or elsewhere with another launch.partition"),
    ("ReqNodeNotAvail.*[Mm]aintenance", f"waits: nodes are reserved for maintenance, which would begin before the "
                                        f"job's time limit; {SHORTER}"),
    (r"ReservedForMaintenance", f"waits: nodes are reserved for maintenance; {SHORTER}"),
    ("ReqNodeNotAvail|NodeDown|NodeNotAvail|Nodes required for job are DOWN", NODES_GONE),
    ("BadConstraints|.*constraints can not be satisfied", "will never run: no nodes of the partition are as it asks "
                                                          "(launch.constraint, gpus_per_node, mem, cpus, extra)"),
    ("ReservationDeleted", "will never run: its reservation (launch.extra) does not exist any more"),
    ("Reservation", "waits for its reservation to begin"),
    ("Licenses", "waits for licenses that other jobs hold (launch.extra)"),
    ("BurstBuffer", "waits for a burst buffer"),
    ("InvalidAccount|AccountNotAllowed", "will never run: its account is unknown, or may not use the partition "
                                         "(launch.account); `sacctmgr show associations user=$USER` shows yours"),
    ("InvalidQOS|QOSNotAllowed", "will never run: its quality of service is unknown, or may not be used here "
                                 "(launch.qos)"),
    (r"AccountingPolicy", "waits: a limit of the account or of the quality of service is reached"),
    (r"Assoc(?!Grp).*PerJob", "will never run: it asks for more than the account may use in one job (launch.account, "
                              "time, nodes)"),
    (r"QOS.*PerJob|QOSMin.*|QOSTimeLimit", "will never run: it asks for more, or less, than its quality of service "
                                           "allows one job (launch.qos, time, nodes)"),
    (r"AssocGrp.*(Minutes|RunMinutes)|QOSGrp.*(Minutes|RunMinutes)|QOSUsageThreshold",
     "waits: the budget of the account or of the quality of service is used up; ask for more, or take another "
     "launch.account"),
    (r"AssocGrp|Association|AssocMax", "waits: the account's jobs use all that it may use at once; it starts when "
                                       "some of them end{fewer}"),
    ("QOSMax|QOSJobLimit", "waits: your jobs use all that the quality of service gives one user at once; it starts "
                           "when some of them end{fewer}"),
    (r"QOS", "waits: the jobs of its quality of service use all that it may use at once{fewer}"),
    ("Cleaning|Prolog", "is being made ready, or cleaned up after its last start"),
    ("JobLaunchFailure|SystemFailure", "could not be started; Slurm tries again, or `scontrol show job {job}` says why "
                                       "not"),
    ("FedJobLock|FrontEndDown", "waits for a part of Slurm that is down"),
)
"""Patterns of reasons, the special before the general; of those that begin alike the first counts."""
NEVER = "will never run"


def meaning(reason: str, job: str = "", *, several: bool = False) -> str:
    """What a reason means, to follow the words `train (job 12)`.

    several: the job is one that may have fewer nodes.
    """
    text = _text(reason)
    if not text:
        return (f"waits for a reason that Slurm calls {reason}; `scontrol show job {job}` and JOB REASON CODES in "
                f"`man squeue` tell more")
    gone = UNAVAILABLE.search(reason)
    return text.format(job=job, nodes=f" ({gone[1]})" if gone else "", fewer=FEWER if several else "")


def is_stuck(reason: str) -> bool:
    """Whether a job that waits for this reason will not start by itself."""
    return _text(reason).startswith(NEVER)


def _text(reason: str) -> str:
    plain = reason.strip("() ").replace("_", " ")  # scontrol writes underscores, squeue blanks
    return next((text for pattern, text in REASONS if re.match(pattern, plain)), "")
