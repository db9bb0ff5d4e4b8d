"""What Slurm's reasons for a waiting job mean (JOB REASON CODES of `man squeue`), and refusals of sbatch, and what the
user can do."""

from __future__ import annotations

import re

EXPECTED = ("", "None", "Dependency", "JobArrayTaskLimit", "Singleton")
"""Reasons that need no explanation: the job waits as planned."""
FEWER = "; to continue sooner, cancel it and submit the same command with fewer --nodes"
ALONE = "it starts when some of them end, and never if it alone requests more"
UNAVAILABLE = re.compile(r"UnavailableNodes:\s*([^)\s]+)")
REASONS = (
    ("BeginTime", "was requeued, or may not start yet; Slurm starts a requeued job after about two minutes"),
    ("DependencyNeverSatisfied", "will never run: a job that it waits for failed"),
    ("Resources", "waits for free nodes{fewer}"),
    ("Priority", "waits: other jobs are ahead of it"),
    ("JobHeldUser", "is held; `scontrol release {job}` releases it"),
    ("JobHeldAdmin", "is held by the administrators; only they can release it"),
    (r"JobHoldMaxRequeue|MaxRequeue", "was requeued as often as the site allows (MaxBatchRequeue) and is held; to "
                                      "continue, `scontrol release {job}`, or `drover cancel` and the same command"),
    ("launch failed requeued held", "could not be started, perhaps because the site's own test of a node failed "
                                    "(`sinfo -R`), and is held; `scontrol release {job}` tries again"),
    ("PartitionNodeLimit", "will never run: it requests more nodes than the partition allows; cancel it and submit the "
                           "same command with fewer --nodes or another launch.partition"),
    ("PartitionTimeLimit", "will never run: it requests more time than the partition allows (launch.time)"),
    ("PartitionDown|PartitionInactive", "waits: its partition takes no jobs now; it starts when the administrators "
                                        "open it, or elsewhere with another launch.partition"),
    ("ReqNodeNotAvail.*[Mm]aintenance|ReservedForMaintenance",
     "waits: nodes are reserved for maintenance, which would begin before the job's time limit; a shorter "
     "launch.train.time may let it start before"),
    ("ReqNodeNotAvail|NodeDown|NodeNotAvail|Nodes required for job are DOWN",
     "waits for nodes that are down, drained or reserved{nodes}; it starts when they are back{fewer}"),
    ("BadConstraints|.*constraints can not be satisfied",
     "will never run: no nodes of the partition fit its request (launch.constraint, gpus_per_node, mem, cpus, extra; "
     "where Slurm does not count GPUs, request_gpus)"),
    ("ReservationDeleted", "will never run: its reservation (launch.extra) no longer exists"),
    ("Reservation", "waits for its reservation to begin"),
    ("Licenses", "waits for licenses that other jobs hold (launch.extra)"),
    ("BurstBuffer", "waits for a burst buffer"),
    ("InvalidAccount|AccountNotAllowed|Job's account not permitted",
     "will never run: its account is unknown, or may not use the partition (launch.account); `sacctmgr show "
     "associations user=$USER` shows yours"),
    ("InvalidQOS|QOSNotAllowed|Job's QOS not permitted",
     "will never run: its quality of service is unknown or forbidden (launch.qos)"),
    (r"AccountingPolicy", "waits: a limit of the account or of the quality of service is reached"),
    (r"Assoc(?!Grp).*PerJob", "will never run: it requests more than the account allows for one job (launch.account, "
                              "time, nodes)"),
    (r"QOS.*PerJob|QOSMin.*|QOSTimeLimit", "will never run: it requests more, or less, than its quality of service "
                                           "allows for one job (launch.qos, time, nodes)"),
    (r"AssocGrp.*(Minutes|RunMinutes)|QOSGrp.*(Minutes|RunMinutes)|QOSUsageThreshold",
     "waits: the budget of the account or of the quality of service is used up; request more, or use another "
     "launch.account"),
    (r"AssocGrp|Association|AssocMax", "waits: the account's jobs have reached its limit; {alone}{fewer}"),
    ("QOSMax|QOSJobLimit", "waits: your jobs have reached the quality of service's limit per user; {alone}{fewer}"),
    (r"QOS", "waits: the jobs of its quality of service have reached the limit; {alone}{fewer}"),
    ("Cleaning|Prolog", "is being prepared, or cleaned up after its last start"),
    ("JobLaunchFailure|SystemFailure", "could not be started; Slurm tries again, or `scontrol show job {job}` shows "
                                       "the reason"),
    ("FedJobLock|FrontEndDown", "waits for a part of Slurm that is down"),
)
"""Patterns of reasons, special ones before general ones: the first that matches counts."""
NEVER = "will never run"
OUT_OF_MEMORY = "(?i)oom.kill|(?<!cuda )(?<!hip )out of memory|exceeded (job |step )?memory limit"
"""Slurm's words where a process exceeded the memory of its job. A full GPU needs other advice."""
REFUSALS = (
    ("time limit is|Node count", "request less (launch.time, launch.<stage>.time, --nodes), or another "
                                 "launch.partition; `scontrol show partition` shows MaxTime and MaxNodes"),
    ("QOS policy|QOS(Max|Min|Grp)|Assoc",
     "a limit of the account or of the quality of service: request less, fewer stages at a time (--stage), or fewer "
     "elements (launch.<stage>.array); or use another launch.qos, launch.account"),
    ("qos spec|QOS|nvalid account", "set launch.account and launch.qos; `sacctmgr show associations user=$USER "
                                    "format=account,partition,qos` shows yours"),
    ("Memory required", "set launch.mem, launch.train.mem and launch.evaluate.mem to what the partition allows "
                        "(`scontrol show partition`: MaxMemPerNode, MaxMemPerCPU)"),
    ("generic resource", "Slurm has no such GPUs: `sinfo --format='%P %N %c %m %G %f'` shows what it has "
                         "(launch.gpu_type, gpus_per_node, extra); launch.request_gpus=false requests none, for sites "
                         "that give whole nodes without counting GPUs"),
    ("feature spec|node config", "no nodes of the partition fit (launch.constraint, gpus_per_node, "
                                                  "gpu_type, mem, cpus, extra); `sinfo --format='%P %N %c %m %G %f'` "
                                                  "shows them"),
    (r"\bpartition\b", "set launch.partition; `sinfo` shows those that take jobs"),
    ("job array", "set launch.shard.array and launch.encode.array to less (`scontrol show config`: MaxArraySize)"),
    ("Unspecified error", "give what the site asks for: launch.account, qos, constraint, partition, time, mem; other "
                          "options of sbatch in launch.extra"))
"""Parts of what Slurm says when it refuses a job, special ones before general ones, and what the user can do."""


def meaning(reason: str, job: str = "", *, several: bool = False) -> str:
    """What a reason means, as the rest of a sentence that starts with `train (job 12)`.

    several: the job can run on fewer nodes.
    """
    text = _text(reason)
    if not text:
        return (f"waits; Slurm gives the reason {reason}, which `scontrol show job {job}` and JOB REASON CODES in "
                f"`man squeue` explain")
    gone = UNAVAILABLE.search(reason)
    return text.format(job=job, nodes=f" ({gone[1]})" if gone else "", alone=ALONE, fewer=FEWER if several else "")


def refusal(message: str, otherwise: str) -> tuple[str, str]:
    """What Slurm said when it refused a job, in one line; what the user can do (`otherwise` if it is not known)."""
    return plain(message), next((advice for pattern, advice in REFUSALS if re.search(pattern, message)), otherwise)


def plain(message: str) -> str:
    """What a program of Slurm said, in one line and without the program's name."""
    return "; ".join(re.split(r"\n+", re.sub(r"(?m)^\w+: (error|fatal): ", "", message).strip()))


def is_stuck(reason: str) -> bool:
    """Whether a job that waits for this reason will never start."""
    return _text(reason).startswith(NEVER)


def _text(reason: str) -> str:
    plain = reason.strip("() ").replace("_", " ")  # scontrol writes underscores, squeue blanks
    return next((text for pattern, text in REASONS if re.match(pattern, plain)), "")
