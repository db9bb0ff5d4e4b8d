"""The fake Slurm's scheduler: a process that starts jobs, watches their end, time and nodes, and kills what must go."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.slurm.fake_state import ACTIVE, MARK, Job, file_name, host_list, marked, opened, select, signal_all

KILL_WAIT_S = 2.0
REQUEUE_DELAY_S = 0.5
NODE_TIMEOUT_S = 1.5


class Scheduler:
    """Looks at the state many times a second. Batch scripts are its children."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.scripts: dict[int, subprocess.Popen[bytes]] = {}

    def run(self, parent: int) -> None:
        """Go on until the file `stop` appears or whoever started the cluster is gone; then kill all jobs."""
        while not (self.base / "stop").exists() and os.getppid() == parent:
            if not (self.base / "no_controller").exists():
                with opened(self.base) as state:
                    for job in list(state["jobs"].values()):
                        if job["state"] in ("RUNNING", "COMPLETING"):
                            self.watch(state, job)
                    waiting = [job for job in state["jobs"].values() if job["state"] == "PENDING"]
                    for job in sorted(waiting, key=lambda job: (job["array"] or job["id"], job["index"])):
                        self.consider(state, job)
            time.sleep(0.05)
        with opened(self.base, write=False) as state:
            for job in state["jobs"].values():
                signal_all(list(marked(self.base, job["id"])), signal.SIGKILL)

    def watch(self, state: dict[str, Any], job: Job) -> None:
        """A running job: has it ended, must it be signalled, must it be killed?"""
        now, script, scale = time.time(), self.scripts.get(job["id"]), state["minute_s"] / 60
        lost = any(state["nodes"][node]["lost"] for node in job["hosts"])
        if job["failed_node"]:
            down = state["nodes"][job["failed_node"]]["lost"]
            if job["kill"] is None and (not down or now > down + NODE_TIMEOUT_S):
                job["kill"] = {"why": "NODE_FAIL", "at": 0.0}
        elif job["limit_s"] and job["kill"] is None:
            end = job["start"] + job["limit_s"] * scale
            wanted = job["signal"]
            if wanted and not job["signalled"] and now > end - wanted["before"] * scale:
                job["signalled"] = True
                processes = marked(self.base, job["id"])
                signal_all([script.pid] if wanted["batch"] and script else
                           [pid for pid, step in processes.items() if step != "batch"], wanted["number"])
            if now > end:
                job["kill"] = {"why": "TIMEOUT", "at": 0.0}
        status = script.poll() if script else 1
        if status is not None and job["kill"] is None and not lost and not job["failed_node"]:
            job["kill"] = {"why": "END", "at": 0.0}
        if job["kill"] is not None:
            self.kill(state, job, status, now)

    def kill(self, state: dict[str, Any], job: Job, status: int | None, now: float) -> None:
        """Ask all that is left of a job to end, then make it; write down how the job ended."""
        why, left = job["kill"]["why"], list(marked(self.base, job["id"]))
        if not job["kill"]["at"]:
            job["kill"]["at"] = now
            if why != "END":
                job["state"] = "COMPLETING"
            signal_all(left, signal.SIGCONT)
            signal_all(left, signal.SIGTERM)
        elif now > job["kill"]["at"] + KILL_WAIT_S:
            signal_all(left, signal.SIGKILL)
        if left or status is None:
            return
        self.scripts.pop(job["id"], None)
        job.update(kill=None, end=now, exit=f"{max(status, 0)}:{max(-status, 0)}", reason="None")
        if why == "REQUEUE" or (why == "NODE_FAIL" and job["requeue"]):
            requeue(job, now)
        elif why == "END":
            job["state"] = "COMPLETED" if status == 0 else "FAILED"
            job["reason"] = "None" if status == 0 else "NonZeroExitCode"
        else:
            job["state"] = why

    def consider(self, state: dict[str, Any], job: Job) -> None:
        """A waiting job: start it, or say why not."""
        dependency = depends(state, job)
        job["never"] = job["never"] or dependency == "never"
        if job["never"]:
            job["reason"] = "DependencyNeverSatisfied"
            if job["kill_on_invalid"]:
                job.update(state="CANCELLED", end=time.time())
        elif job["held"]:
            job["reason"] = "JobHeldUser"
        elif dependency == "wait":
            job["reason"] = "Dependency"
        elif time.time() < job["eligible"]:
            job["reason"] = "BeginTime"
        elif job["array_limit"] and job["array_limit"] <= sum(
                other["array"] == job["array"] and other["state"] in ("RUNNING", "COMPLETING")
                for other in state["jobs"].values()):
            job["reason"] = "JobArrayTaskLimit"
        elif (tasks := place(state, job)) is None:
            job["reason"] = "PartitionConfig" if job["nodes"] > len(state["nodes"]) else "Resources"
        else:
            self.start(state, job, tasks)

    def start(self, state: dict[str, Any], job: Job, tasks: dict[str, int]) -> None:
        """Run the batch script on the first of its nodes."""
        job.update(state="RUNNING", reason="None", start=time.time(), end=None, hosts=list(tasks), steps=0, kill=None,
                   tasks=list(tasks.values()), signalled=False, failed_node="")
        variables = {**json.loads((self.base / "environments" / str(job["script"])).read_text()),
                     **batch_environment(state, job), "FAKE_SLURM": str(self.base)}
        mode = "ab" if job["open_mode"].startswith("a") else "wb"
        output, error = (file_name(job[which] or job["output"], job) for which in ("output", "error"))
        try:
            with open(output, mode) as out, open(error, "ab" if error == output else mode) as err:
                self.scripts[job["id"]] = subprocess.Popen(
                    [self.base / "scripts" / str(job["script"]), *job["arguments"]], cwd=job["workdir"], env=variables,
                    stdin=subprocess.DEVNULL, stdout=out, stderr=out if error == output else err,
                    start_new_session=True)
        except OSError:  # the folder of its output or of its work is not there
            job.update(state="FAILED", exit="1:0", end=time.time(), reason="NonZeroExitCode")


def requeue(job: Job, now: float) -> None:
    """Back into the queue under the same id."""
    job.update(state="PENDING", reason="BeginTime", restarts=job["restarts"] + 1, kill=None, failed_node="",
               eligible=now + REQUEUE_DELAY_S, hosts=[], start=None)


def depends(state: dict[str, Any], job: Job) -> str:
    """What the dependencies of a job say: met, wait or never. Jobs that nobody knows (any more) count as met."""
    answers = {"met"}
    for part in filter(None, job["dependency"].split(",")):
        kind, *ids = part.split(":")
        if kind == "singleton":
            twins = [other for other in state["jobs"].values() if other["id"] < job["id"] and other["state"] in ACTIVE
                     and (other["name"], other["user"]) == (job["name"], job["user"])]
            answers.add("wait" if twins else "met")
        for other in [found for identity in ids for found in select(state, identity.partition("+")[0])]:
            if kind == "aftercorr" and other["index"] != job["index"]:
                continue
            ended, good = other["state"] not in ACTIVE, other["state"] == "COMPLETED"
            if kind == "after":
                answers.add("met" if ended or other["start"] else "wait")
            elif not ended:
                answers.add("wait")
            elif (kind in ("afterok", "aftercorr") and not good) or (kind == "afternotok" and good):
                answers.add("never")
    return next(answer for answer in ("never", "wait", "met") if answer in answers)


def place(state: dict[str, Any], job: Job) -> dict[str, int] | None:
    """The tasks of a job on each node that it gets, None if it must wait."""
    free = {name: node["cpus"] for name, node in state["nodes"].items() if not node["lost"] and not node["drained"]}
    for other in state["jobs"].values():
        if other["state"] in ("RUNNING", "COMPLETING"):
            for node, count in zip(other["hosts"], other["tasks"], strict=True):
                if node in free:
                    free[node] -= state["nodes"][node]["cpus"] if other["exclusive"] else count * other["cpus"]
    usable = [node for node, cpus in free.items() if node not in job["exclude"] and cpus >= job["cpus"]
              and (not job["exclusive"] or cpus == state["nodes"][node]["cpus"])]
    if any(node not in usable for node in job["nodelist"]):
        return None
    usable.sort(key=lambda node: (node not in job["nodelist"], int(node[1:])))
    if job["nodes"] == 0:  # as many as the tasks need
        chosen: dict[str, int] = {}
        for node in usable:
            count = min(job["ntasks"] - sum(chosen.values()), free[node] // job["cpus"])
            chosen |= {node: count} if count else {}
        return chosen if sum(chosen.values()) == job["ntasks"] else None
    base, extra = divmod(job["ntasks"], job["nodes"])
    need = (base + bool(extra)) * job["cpus"]
    fitting = sorted([node for node in usable if free[node] >= need][:job["nodes"]], key=lambda node: int(node[1:]))
    return {node: base + (rank < extra) for rank, node in enumerate(fitting)} if len(fitting) == job["nodes"] else None


def counted(values: list[int]) -> str:
    """`2(x3),1` for 2, 2, 2, 1."""
    runs: list[list[int]] = []
    for value in values:
        if runs and runs[-1][0] == value:
            runs[-1][1] += 1
        else:
            runs.append([value, 1])
    return ",".join(f"{value}(x{count})" if count > 1 else str(value) for value, count in runs)


def batch_environment(state: dict[str, Any], job: Job) -> dict[str, str]:
    """What Slurm adds to the environment of a batch script."""
    names, first = host_list(job["hosts"]), job["hosts"][0]
    found = {
        "SLURM_JOB_ID": job["id"], "SLURM_JOBID": job["id"], "SLURM_JOB_NAME": job["name"],
        "SLURM_JOB_UID": os.getuid(), "SLURM_JOB_USER": job["user"], "SLURM_JOB_PARTITION": "debug",
        "SLURM_CLUSTER_NAME": "fake",
        "SLURM_JOB_NODELIST": names, "SLURM_NODELIST": names, "SLURM_JOB_NUM_NODES": len(job["hosts"]),
        "SLURM_NNODES": len(job["hosts"]), "SLURM_NTASKS": sum(job["tasks"]), "SLURM_NPROCS": sum(job["tasks"]),
        "SLURM_TASKS_PER_NODE": counted(job["tasks"]), "SLURM_CPUS_ON_NODE": job["tasks"][0] * job["cpus"],
        "SLURM_JOB_CPUS_PER_NODE": counted([count * job["cpus"] for count in job["tasks"]]),
        "SLURM_SUBMIT_DIR": job["submit_dir"], "SLURM_PROCID": 0, "SLURM_LOCALID": 0, "SLURM_NODEID": 0,
        "SLURM_GTIDS": 0, "SLURMD_NODENAME": first, MARK: f"{job['id']}.batch.{first}"}
    if job["restarts"]:
        found["SLURM_RESTART_COUNT"] = job["restarts"]
    if job["cpus_asked"]:
        found["SLURM_CPUS_PER_TASK"] = job["cpus"]
    if job["tasks_per_node"]:
        found["SLURM_NTASKS_PER_NODE"] = job["tasks_per_node"]
    if job["array"] is not None:
        indexes = [other["index"] for other in state["jobs"].values() if other["array"] == job["array"]]
        found |= {"SLURM_ARRAY_JOB_ID": job["array"], "SLURM_ARRAY_TASK_ID": job["index"],
                  "SLURM_ARRAY_TASK_COUNT": len(indexes), "SLURM_ARRAY_TASK_MIN": min(indexes),
                  "SLURM_ARRAY_TASK_MAX": max(indexes), "SLURM_ARRAY_TASK_STEP": 1}
    return {name: str(value) for name, value in found.items()}


if __name__ == "__main__":
    Scheduler(Path(sys.argv[1])).run(int(sys.argv[2]))
