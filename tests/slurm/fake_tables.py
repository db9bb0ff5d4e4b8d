"""How the fake Slurm shows its jobs and nodes: the columns of squeue, sacct, scontrol and sinfo."""

from __future__ import annotations

import re
import time
from typing import Any

from tests.slurm.fake_state import Job, clock, file_name, host_list, moment, shown, spans

SHORT = {"PENDING": "PD", "RUNNING": "R", "COMPLETING": "CG", "COMPLETED": "CD", "FAILED": "F", "CANCELLED": "CA",
         "TIMEOUT": "TO", "NODE_FAIL": "NF"}
TITLES = {"i": "JOBID", "A": "JOBID", "F": "ARRAY_JOB_ID", "K": "ARRAY_TASK_ID", "T": "STATE", "t": "ST", "r": "REASON",
          "N": "NODELIST", "M": "TIME", "j": "NAME", "l": "TIME_LIMIT", "L": "TIME_LEFT", "D": "NODES",
          "R": "NODELIST(REASON)", "u": "USER", "P": "PARTITION", "S": "START_TIME", "V": "SUBMIT_TIME",
          "E": "DEPENDENCY", "C": "CPUS", "k": "COMMENT", "Z": "WORK_DIR", "Q": "PRIORITY", "a": "ACCOUNT",
          "X": "RESTART_COUNT"}
LONG = {"jobarrayid": "i", "state": "T", "reason": "r", "nodelist": "N", "timeused": "M", "restartcnt": "X",
        "name": "j"}
"""What is the same as which letter, of the fields of `--Format`."""


def elapsed(job: Job) -> float:
    """Seconds since the start, up to the end if there is one."""
    return (job["end"] or time.time()) - job["start"] if job["start"] else 0.0


def squeue_lines(jobs: list[Job], pattern: str, bare: bool, each_element: bool) -> list[str]:
    """squeue's lines; the waiting elements of an array in one, unless each is asked for."""
    form = pattern or "%.18i %.9P %.8j %.8u %.2t %.10M %.6D %R"
    lines = [] if bare else [_filled(form, TITLES)]
    waiting: dict[int, list[Job]] = {}
    for job in jobs:
        if job["array"] is not None and job["state"] == "PENDING" and not each_element and not job["restarts"]:
            waiting.setdefault(job["array"], []).append(job)
    for array, elements in waiting.items():
        limit = f"%{elements[0]['array_limit']}" if elements[0]["array_limit"] else ""
        inside = spans(sorted(job["index"] for job in elements)) + limit
        lines.append(_filled(form, _columns(elements[-1], f"{array}_[{inside}]", inside)))
    collapsed = {job["id"] for elements in waiting.values() for job in elements}
    return lines + [_filled(form, _columns(job, shown(job), str(job["index"]) if job["array"] else "N/A"))
                    for job in jobs if job["id"] not in collapsed]


def long_form(text: str) -> str:
    """squeue's `--Format` (`JobArrayID:40,State:20`) as a `--format`."""
    columns = (column.partition(":") for column in text.split(","))
    return "".join(f"%{width or 20}{LONG[name.lower()]}" for name, _, width in columns)


def _columns(job: Job, identity: str, index: str) -> dict[str, str]:
    nodes, limit = host_list(job["hosts"]), job["limit_s"]
    return {"i": identity, "A": str(job["id"]), "F": str(job["array"] or job["id"]), "K": index, "T": job["state"],
            "t": SHORT[job["state"]], "r": job["reason"], "N": nodes, "M": clock(elapsed(job)), "j": job["name"],
            "l": clock(limit) if limit else "UNLIMITED", "L": clock(limit - elapsed(job)) if limit else "UNLIMITED",
            "D": str(len(job["hosts"]) or job["nodes"] or 1), "R": nodes or f"({job['reason']})", "u": job["user"],
            "P": "debug", "S": moment(job["start"], "N/A"), "V": moment(job["submitted"]),
            "E": job["dependency"] or "(null)", "C": str(job["ntasks"] * job["cpus"]), "k": job["comment"] or "(null)",
            "X": str(job["restarts"]), "Z": job["workdir"], "Q": "1", "a": "(null)"}


def _filled(form: str, columns: dict[str, str]) -> str:
    def fill(found: re.Match[str]) -> str:
        text, width = columns[found[3]], int(found[2] or 0)
        cut = text[:width] if width else text
        return cut.rjust(width) if found[1] else cut.ljust(width)
    return re.sub(r"%(\.?)(\d*)([a-zA-Z])", fill, form)


def sacct_rows(jobs: list[Job], fields: list[str], steps: bool) -> list[list[str]]:
    """sacct's table, the header first; a job that waits to run again is REQUEUED or PENDING."""
    titles = [field.partition("%")[0] for field in fields]
    rows = [titles]
    for job in jobs:
        values = {
            "jobid": shown(job), "jobidraw": str(job["id"]), "jobname": job["name"], "partition": "debug",
            "state": "RUNNING" if job["state"] == "COMPLETING" else job["state"], "exitcode": job["exit"],
            "nodelist": host_list(job["hosts"]) or "None assigned", "elapsed": clock(elapsed(job), short=False),
            "elapsedraw": str(int(elapsed(job))), "start": moment(job["start"]), "end": moment(job["end"]),
            "submit": moment(job["submitted"]), "user": job["user"], "account": "", "restarts": str(job["restarts"]),
            "allocnodes": str(len(job["hosts"])), "nnodes": str(len(job["hosts"]) or job["nodes"] or 1),
            "alloccpus": str(sum(job["tasks"]) * job["cpus"]), "reason": job["reason"], "workdir": job["workdir"],
            "derivedexitcode": job["exit"], "timelimit": clock(job["limit_s"]) if job["limit_s"] else "UNLIMITED"}
        rows.append([values[title.lower()] for title in titles])
        if steps and job["hosts"]:
            batch = {**values, "jobid": f"{values['jobid']}.batch", "jobidraw": f"{values['jobidraw']}.batch",
                     "jobname": "batch", "partition": "", "user": "", "nodelist": job["hosts"][0]}
            rows.append([batch[title.lower()] for title in titles])
    return rows


def show_job(job: Job, one_line: bool) -> str:
    """scontrol show job."""
    array = f"ArrayJobId={job['array']} ArrayTaskId={job['index']} " if job["array"] is not None else ""
    limit = clock(job["limit_s"], short=False) if job["limit_s"] else "UNLIMITED"
    lines = [
        f"JobId={job['id']} {array}JobName={job['name']}", f"UserId={job['user']}(0) Priority=1",
        f"JobState={job['state']} Reason={job['reason']} Dependency={job['dependency'] or '(null)'}",
        f"Requeue={int(job['requeue'])} Restarts={job['restarts']} BatchFlag=1 Reboot=0 ExitCode={job['exit']}",
        f"RunTime={clock(elapsed(job), short=False)} TimeLimit={limit} TimeMin=N/A",
        f"SubmitTime={moment(job['submitted'])} EligibleTime={moment(job['eligible'] or job['submitted'])}",
        f"StartTime={moment(job['start'])} EndTime={moment(job['end'])} Deadline=N/A", "Partition=debug",
        f"ReqNodeList={host_list(job['nodelist']) or '(null)'} ExcNodeList={host_list(job['exclude']) or '(null)'}",
        f"NodeList={host_list(job['hosts'])}", *([f"BatchHost={job['hosts'][0]}"] if job["hosts"] else []),
        f"NumNodes={len(job['hosts']) or job['nodes'] or 1} NumTasks={job['ntasks']} CPUs/Task={job['cpus']}",
        f"WorkDir={job['workdir']}", f"StdErr={file_name(job['error'] or job['output'], job)}", "StdIn=/dev/null",
        f"StdOut={file_name(job['output'], job)}"]
    return (" " if one_line else "\n   ").join(lines) + ("" if one_line else "\n")


def node_state(state: dict[str, Any], name: str) -> str:
    """idle, mixed, allocated, drained or down*."""
    node = state["nodes"][name]
    used = sum(other["cpus"] * count for other in state["jobs"].values() if other["state"] in ("RUNNING", "COMPLETING")
               for host, count in zip(other["hosts"], other["tasks"], strict=True) if host == name)
    if node["lost"]:
        return "down*"
    if node["drained"]:
        return "draining" if used else "drained"
    return "idle" if not used else "mixed" if used < node["cpus"] else "allocated"


def node_line(state: dict[str, Any], name: str, one_line: bool, form: str = "") -> str:
    """scontrol show node, or a line of sinfo in its format."""
    cpus, now = state["nodes"][name]["cpus"], node_state(state, name)
    if form:
        return _filled(form, {"N": name, "n": name, "T": now, "t": now[:4], "D": "1", "P": "debug*", "c": str(cpus),
                              "m": "6000", "G": "(null)", "a": "up", "l": "infinite", "E": "none"})
    lines = [f"NodeName={name} Arch=x86_64", f"CPUTot={cpus} AvailableFeatures=(null) Gres=(null)",
             f"NodeAddr=127.0.0.1 NodeHostName={name} Port=0", f"RealMemory=6000 State={now.upper()} Partitions=debug"]
    return (" " if one_line else "\n   ").join(lines) + ("" if one_line else "\n")
