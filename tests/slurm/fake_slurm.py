"""Slurm's programs for machines without Slurm: one program under seven names, over a JSON state and a scheduler.

Misbehaviour on demand, by environment variable: FAKE_SLURM_NO_SACCT, FAKE_SLURM_SQUEUE_HANGS, and
FAKE_SLURM_REQUEUE_FORBIDDEN. tests/slurm/test_fake_slurm.py asks it and the real one the same questions.
"""

from __future__ import annotations

import getopt
import json
import os
import pwd
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

from tests.slurm.fake_options import exported, parse, script_options
from tests.slurm.fake_scheduler import requeue
from tests.slurm.fake_srun import srun
from tests.slurm.fake_state import (
    ACTIVE,
    MARK,
    UNREACHABLE,
    Job,
    SlurmError,
    controller_stopped,
    folder,
    hosts,
    indices,
    marked,
    opened,
    seconds,
    select,
    shown,
    signal_all,
)
from tests.slurm.fake_tables import long_form, node_line, sacct_rows, show_job, squeue_lines

SIGNAL = re.compile(r"(?:([BR]+):)?(?:SIG)?(\w+)(?:@(\d+))?")


def sbatch(arguments: list[str]) -> int:
    """Take a batch script into the queue."""
    given, rest = parse("sbatch", arguments)
    if "wrap" in given:
        text, name = f"#!/bin/sh\n# This script was created by sbatch --wrap.\n\n{given['wrap']}\n", "wrap"
    elif rest:
        if not Path(rest[0]).is_file():
            raise SlurmError(f"Unable to open file {rest[0]}")
        text, name = Path(rest[0]).read_text(), Path(rest[0]).name
    else:
        text, name = sys.stdin.read(), "sbatch"
    if not text.startswith("#!"):
        raise SlurmError("This does not look like a batch script.  The first line must start with #! followed by the "
                         "path to an interpreter.")
    options = {**parse("sbatch", script_options(text))[0], **given}
    if controller_stopped():
        raise SlurmError(f"Batch job submission failed: {UNREACHABLE}")
    with opened() as state:
        jobs = submitted(state, options, rest[1:], name)
        first = jobs[-1]["id"]
        for part, content in (("scripts", text), ("environments", json.dumps(
                {key: value for key, value in exported(options.get("export", "")).items() if key != MARK}))):
            path = folder() / part / str(first)
            path.write_text(content)
            path.chmod(0o755)
        for job in jobs:
            state["jobs"][str(job["id"])] = job
    print(first if "parsable" in options else f"Submitted batch job {first}")
    return 0


def submitted(state: dict[str, Any], options: dict[str, str], arguments: list[str], name: str) -> list[Job]:
    """The records of a new job, one for each element of an array. The last element has the id of the array itself."""
    excluded, wanted = hosts(options.get("exclude", "")), hosts(options.get("nodelist", ""))
    if set(excluded + wanted) - set(state["nodes"]):
        raise SlurmError("Batch job submission failed: Invalid node name specified")
    if options.get("partition", "debug") != "debug":
        raise SlurmError("Batch job submission failed: Invalid partition name specified")
    if any(option in options for option in ("gres", "gpus-per-node", "gpus-per-task")):
        raise SlurmError("Batch job submission failed: Invalid generic resource (gres) specification")
    elements, limit = indices(options["array"]) if "array" in options else ([], 0)
    per_node, cpus = int(options.get("ntasks-per-node", 0)), int(options.get("cpus-per-task", 1))
    nodes = int(options["nodes"].split("-")[0]) if "nodes" in options else 1 if per_node else 0
    tasks = int(options.get("ntasks", 0)) or nodes * per_node or max(nodes, 1)
    if cpus * max(per_node, 1) > max(node["cpus"] for node in state["nodes"].values()):
        raise SlurmError("Batch job submission failed: Requested node configuration is not available")
    first = state["next"]
    state["next"] += max(1, len(elements))
    output = options.get("output", "slurm-%A_%a.out" if elements else "slurm-%j.out")
    job = {
        "id": first, "array": None, "index": 0, "array_limit": limit, "script": first, "arguments": arguments,
        "name": options.get("job-name", name), "user": pwd.getpwuid(os.getuid()).pw_name, "submit_dir": str(Path.cwd()),
        "workdir": str(Path(options.get("chdir", ".")).absolute()), "output": output, "error": options.get("error", ""),
        "open_mode": options.get("open-mode", "truncate"), "nodes": nodes, "ntasks": tasks, "tasks_per_node": per_node,
        "cpus": cpus, "cpus_asked": "cpus-per-task" in options, "exclusive": "exclusive" in options,
        "limit_s": seconds(options.get("time", "")), "signal": asked_signal(options.get("signal", "")),
        "requeue": "no-requeue" not in options, "exclude": excluded, "nodelist": wanted, "held": "hold" in options,
        "dependency": options.get("dependency", ""), "kill_on_invalid": options.get("kill-on-invalid-dep") == "yes",
        "state": "PENDING", "reason": "None", "restarts": 0, "eligible": 0.0, "submitted": time.time(), "start": None,
        "end": None, "exit": "0:0", "hosts": [], "tasks": [], "steps": 0, "kill": None, "signalled": False,
        "failed_node": "", "never": False, "comment": options.get("comment", "")}
    ids = [*range(first + 1, first + len(elements)), first]
    return [{**job, "id": identity, "array": first, "index": index}
            for identity, index in zip(ids, elements, strict=True)] if elements else [job]


def asked_signal(text: str) -> dict[str, Any] | None:
    """`[B:]USR2@90` as what to send, how many seconds before the end, and whether to the batch shell."""
    found = SIGNAL.fullmatch(text)
    if not text or found is None:
        return None
    return {"batch": "B" in (found[1] or ""), "number": signal_number(found[2]), "before": int(found[3] or 60)}


def signal_number(text: str) -> int:
    """USR2, SIGUSR2 or 12."""
    return int(text) if text.isdigit() else int(signal.Signals[f"SIG{text.upper().removeprefix('SIG')}"])


def squeue(arguments: list[str]) -> int:
    """The jobs that wait or run."""
    if hang := os.environ.get("FAKE_SLURM_SQUEUE_HANGS"):
        time.sleep(float(hang) if float(hang) > 1 else 3600)
    options, _ = getopt.gnu_getopt(arguments, "ho:O:j:n:u:t:rw:p:", [
        "noheader", "format=", "Format=", "jobs=", "name=", "user=", "states=", "array", "nodelist=", "me",
        "partition="])
    found = {key.lstrip("-"): value for key, value in options}
    if controller_stopped():
        raise SlurmError(f"slurm_load_jobs error: {UNREACHABLE}", 1)
    with opened(write=False) as state:
        jobs = list(state["jobs"].values())
        if ids := found.get("j", found.get("jobs")):
            jobs = select(state, ids)
            if not jobs and "," not in ids:
                raise SlurmError("slurm_load_jobs error: Invalid job id specified")
    names, states = (found.get(short, found.get(long, "")) for short, long in (("n", "name"), ("t", "states")))
    jobs = [job for job in jobs if (job["state"] in ACTIVE or states)
            and (not names or job["name"] in names.split(","))
            and (states.lower() in ("", "all") or job["state"] in states.upper().replace("PD", "PENDING").split(","))]
    form = long_form(found[key]) if (key := "O" if "O" in found else "Format") in found else (
        found.get("o", found.get("format", "")))
    for line in squeue_lines(jobs, form, "h" in found or "noheader" in found, "r" in found or "array" in found):
        print(line)
    return 0


def sacct(arguments: list[str]) -> int:
    """What has become of jobs, also of those that ended."""
    if os.environ.get("FAKE_SLURM_NO_SACCT") or (folder() / "no_accounting").exists():
        raise SlurmError("Slurm accounting storage is disabled")
    options, _ = getopt.gnu_getopt(arguments, "nPpo:j:XS:E:u:as:D", [
        "noheader", "parsable", "parsable2", "format=", "jobs=", "allocations", "starttime=", "endtime=", "user=",
        "allusers", "state=", "duplicates", "name="])
    found = {key.lstrip("-"): value for key, value in options}
    with opened(write=False) as state:
        jobs = select(state, found[key]) if (key := "j" if "j" in found else "jobs") in found else list(
            state["jobs"].values())
    rows = sacct_rows([job for job in jobs if job["start"] or job["end"]],
                      found.get("o", found.get("format", "JobID,JobName,Partition,State,ExitCode")).split(","),
                      "X" not in found and "allocations" not in found)
    parsable = any(name in found for name in ("P", "p", "parsable", "parsable2"))
    for row in rows["n" in found or "noheader" in found:]:
        print("|".join(row) if parsable else " ".join(f"{cell[:20]:>12}" for cell in row))
    return 0


def scancel(arguments: list[str]) -> int:
    """End jobs, or signal their steps."""
    options, ids = getopt.gnu_getopt(arguments, "s:n:u:t:bfvQ", [
        "signal=", "name=", "user=", "state=", "me", "batch", "full", "quiet", "verbose"])
    found = {key.lstrip("-"): value for key, value in options}
    if controller_stopped():
        raise SlurmError(f"error: Kill job error on job id {','.join(ids)}: {UNREACHABLE}", 8)
    chosen_signal = found.get("s", found.get("signal"))
    with opened() as state:
        jobs = [job for text in ids for job in select(state, text)] if ids else [
            job for job in state["jobs"].values() if {"u", "user", "me", "n", "name"} & set(found)]
        names, states = found.get("n", found.get("name", "")), found.get("t", found.get("state", "")).upper()
        for job in jobs:
            if job["state"] not in ACTIVE or (names and job["name"] not in names.split(",")) or (
                    states and states not in (job["state"], {"PENDING": "PD", "RUNNING": "R"}.get(job["state"]))):
                continue
            if chosen_signal and signal_number(chosen_signal) not in (signal.SIGKILL,) and job["state"] == "RUNNING":
                wanted = marked(folder(), job["id"])
                batch, full = {"b", "batch"} & set(found), {"f", "full"} & set(found)
                signal_all([identity for identity, step in wanted.items() if full or (step == "batch") == bool(batch)],
                           signal_number(chosen_signal))
            elif job["state"] == "PENDING":
                job.update(state="CANCELLED", end=time.time(), reason="None")
            else:
                job["kill"] = {"why": "CANCELLED", "at": 0.0}
    return 0


def scontrol(arguments: list[str]) -> int:
    """Show and change."""
    words = [word for word in arguments if word not in ("-o", "--oneliner", "-Q", "-d", "--details")]
    one_line = "-o" in arguments or "--oneliner" in arguments
    command, rest = words[0], words[1:]
    if command == "show" and rest[0] in ("hostnames", "hostname"):
        print("\n".join(hosts(rest[1] if len(rest) > 1 else os.environ["SLURM_JOB_NODELIST"])))
        return 0
    if controller_stopped():
        if command == "ping":
            print("Slurmctld(primary) at fake is DOWN")
            return 1
        raise SlurmError(f"slurm_load_jobs error: {UNREACHABLE}" if command == "show" else
                         f"Unexpected message received for job {rest[-1]}")
    if command == "ping":
        print("Slurmctld(primary) at fake is UP")
        return 0
    with opened() as state:
        if command == "show" and rest[0].startswith("node"):
            names = hosts(rest[1]) if len(rest) > 1 else list(state["nodes"])
            for name in names:
                print(node_line(state, name, one_line))
        elif command == "show" and rest[0].startswith("job"):
            jobs = select(state, rest[1]) if len(rest) > 1 else list(state["jobs"].values())
            if not jobs:
                raise SlurmError("slurm_load_jobs error: Invalid job id specified")
            for job in jobs:
                print(show_job(job, one_line))
        elif command in ("requeue", "requeuehold", "hold", "release"):
            for text in ",".join(rest).split(","):
                change(state, command, text)
        elif command == "update":
            update(state, dict(word.split("=", 1) for word in rest))
        else:
            raise SlurmError(f"the fake scontrol does not know: {' '.join(arguments)}")
    return 0


def change(state: dict[str, Any], command: str, text: str) -> None:
    """Requeue, hold or release the jobs of an id."""
    jobs = select(state, text)
    if not jobs:
        raise SlurmError(f"Invalid job id specified for job {text}")
    for job in jobs:
        if command in ("hold", "release"):
            job["held"] = command == "hold"
            continue
        if os.environ.get("FAKE_SLURM_REQUEUE_FORBIDDEN") or not job["requeue"] or not state["requeue"]:
            raise SlurmError(f"Requested operation is presently disabled for job {shown(job)}")
        if job["state"] == "PENDING":
            raise SlurmError(f"Job is pending execution for job {shown(job)}")
        job["held"] = command == "requeuehold"
        if job["state"] in ACTIVE:
            job["kill"] = {"why": "REQUEUE", "at": 0.0}
        else:
            requeue(job, time.time())


def update(state: dict[str, Any], words: dict[str, str]) -> None:
    """scontrol update: of a job or of a node."""
    named = {name.lower(): value for name, value in words.items()}
    if "nodename" in named:
        for name in hosts(named["nodename"]):
            state["nodes"][name]["drained"] = named["state"].upper() in ("DRAIN", "DOWN")
        return
    identity = named.pop("jobid", named.pop("job", ""))
    jobs = select(state, identity)
    if not jobs:
        raise SlurmError("Invalid job id specified")
    for job in jobs:
        for name, value in named.items():
            if name == "excnodelist":
                job["exclude"] = hosts(value)
            elif name == "timelimit":
                job["limit_s"] = seconds(value)
            elif name in ("dependency", "comment"):
                job[name] = value
            elif name in ("jobname", "name"):
                job["name"] = value
            elif name == "requeue":
                job["requeue"] = value == "1"
            else:
                raise SlurmError(f"the fake scontrol does not update {name}")


def sinfo(arguments: list[str]) -> int:
    """The nodes."""
    options, _ = getopt.gnu_getopt(arguments, "hNo:n:t:p:", [
        "noheader", "Node", "format=", "nodes=", "states=", "partition="])
    found = {key.lstrip("-"): value for key, value in options}
    if controller_stopped():
        raise SlurmError(f"slurm_load_partitions: {UNREACHABLE}")
    with opened(write=False) as state:
        chosen = found.get("n", found.get("nodes", ""))
        names = hosts(chosen) if chosen else list(state["nodes"])
        lines = [node_line(state, name, True, found.get("o", found.get("format", "%N %T"))) for name in names]
    print("\n".join(lines))
    return 0


PROGRAMS = {"sbatch": sbatch, "srun": srun, "squeue": squeue, "sacct": sacct, "scontrol": scontrol,
            "scancel": scancel, "sinfo": sinfo}


def main(program: str, arguments: list[str]) -> int:
    """One of Slurm's programs; what it refuses, it says in Slurm's words."""
    if arguments in (["--version"], ["-V"]):
        print("slurm 22.05.8 (fake)")
        return 0
    try:
        return PROGRAMS[program](arguments)
    except SlurmError as error:
        prefix = "" if program in ("scontrol", "squeue", "sinfo", "sacct") or str(error).startswith("error") else (
            f"{program}: error: ")
        print(f"{prefix}{error}", file=sys.stderr)
        return error.status
    except getopt.GetoptError as error:
        print(f"{program}: unrecognized option '{error.opt}'", file=sys.stderr)
        return 1
