"""What the fake Slurm remembers: a JSON file under a lock, and how Slurm writes nodes, arrays, times and file names."""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

Job = dict[str, Any]
MARK = "FAKE_SLURM_TASK"
"""A variable of each process of a job: `<job>.<step or batch>.<node>`. It outlives parents, as control groups do."""
ACTIVE = ("PENDING", "RUNNING", "COMPLETING")
UNREACHABLE = "Unable to contact slurm controller (connect failure)"


class SlurmError(Exception):
    """A refusal in Slurm's words, and the exit status of the program that says them."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


def folder() -> Path:
    """Where the fake cluster of this process lives."""
    return Path(os.environ["FAKE_SLURM"])


@contextmanager
def opened(where: Path | None = None, write: bool = True) -> Iterator[dict[str, Any]]:
    """The state, locked; written back afterwards unless told otherwise."""
    base = where or folder()
    with open(base / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        state = json.loads((base / "state.json").read_text())
        yield state
        if write:
            (base / "state.tmp").write_text(json.dumps(state))
            (base / "state.tmp").replace(base / "state.json")


def controller_stopped() -> bool:
    """Whether slurmctld is away: no command is answered, no job started or ended."""
    return (folder() / "no_controller").exists()


def select(state: dict[str, Any], text: str) -> list[Job]:
    """The jobs meant by `12` (an array: all its elements), `12_3`, `12_[1-3]` or a list of these."""
    found: list[Job] = []
    jobs = list(state["jobs"].values())
    for part in re.findall(r"[^,\[]+(?:\[[^\]]*\])?", text):
        base, _, index = part.strip(" ,").partition("_")
        if index:
            wanted = indices(index.strip("[]"))[0]
            found += [job for job in jobs if str(job["array"]) == base and job["index"] in wanted]
        else:
            found += ([job for job in jobs if str(job["array"]) == base]
                      or [job for job in jobs if str(job["id"]) == base])
    return found


def shown(job: Job) -> str:
    """The id that squeue shows."""
    return str(job["id"]) if job["array"] is None else f"{job['array']}_{job['index']}"


def indices(text: str) -> tuple[list[int], int]:
    """`0-3,7%2` as its numbers and the limit of elements at once (0: none).

    Raises:
        SlurmError: it is no such text.
    """
    numbers, _, limit = text.partition("%")
    try:
        found: set[int] = set()
        for part in numbers.split(","):
            span, _, step = part.partition(":")
            first, _, last = span.partition("-")
            found |= set(range(int(first), int(last or first) + 1, int(step or 1)))
        return sorted(found), int(limit or 0)
    except ValueError:
        raise SlurmError("Batch job submission failed: Invalid job array specification") from None


def hosts(text: str) -> list[str]:
    """`n[1-3,7],m05` as names."""
    names = []
    for prefix, inside in re.findall(r"([^,\[\]]+)(?:\[([^\]]*)\])?", text):
        if not inside:
            names.append(prefix)
        for span in filter(None, inside.split(",")):
            first, _, last = span.partition("-")
            names += [f"{prefix}{number:0{len(first)}d}" for number in range(int(first), int(last or first) + 1)]
    return names


def spans(numbers: list[int]) -> str:
    """Ascending numbers as `1-3,7`."""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in found)


def host_list(names: list[str]) -> str:
    """Names of the fake's own nodes as `n[1-3,7]`."""
    if len(names) < 2:
        return "".join(names)
    return f"n[{spans(sorted(int(name[1:]) for name in names))}]"


def seconds(text: str) -> float | None:
    """Slurm's time limits: minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]]."""
    if text.upper() in ("", "0", "INFINITE", "UNLIMITED"):
        return None
    if not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", text):
        raise SlurmError("Invalid --time specification", 255)
    days, dash, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:
        parts = [*parts, 0, 0][:3]
    elif len(parts) < 3:
        parts = [0, *parts, 0][:3]
    return int(days or 0) * 86400.0 + parts[0] * 3600 + parts[1] * 60 + parts[2]


def clock(duration: float, short: bool = True) -> str:
    """Seconds as squeue shows them (`1-02:03:04`, `2:03`), or as sacct and scontrol do (`00:02:03`)."""
    days, rest = divmod(int(duration), 86400)
    hours, minutes, left = rest // 3600, rest % 3600 // 60, rest % 60
    if days:
        return f"{days}-{hours:02d}:{minutes:02d}:{left:02d}"
    return f"{minutes}:{left:02d}" if short and not hours else f"{hours:02d}:{minutes:02d}:{left:02d}"


def moment(when: float | None, missing: str = "Unknown") -> str:
    """A point in time as Slurm writes it."""
    return missing if when is None else time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(when))


def file_name(pattern: str, job: Job, task: int = 0, node: str = "", step: str = "batch") -> Path:
    """`%j %A %a %x %t %N %n %s %J %u` filled in, relative to the job's folder."""
    values = {"j": job["id"], "A": job["array"] or job["id"], "a": 4294967294 if job["array"] is None else job["index"],
              "x": job["name"], "t": task, "n": 0, "N": node or (job["hosts"] or [""])[0], "s": step, "u": job["user"],
              "J": f"{job['id']}.{step}" if step != "batch" else job["id"], "%": "%"}
    filled = re.sub(r"%(\d*)([jAaxtnNsuJ%])", lambda found: str(values[found[2]]).zfill(int(found[1] or 0)), pattern)
    return Path(job["workdir"], filled)


def marked(base: Path, job: int, step: str | None = None, node: str | None = None) -> dict[int, str]:
    """The processes of a job (of one step or `batch`; on one node), each with its step."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            variables = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        mark = next((text.decode() for text in variables if text.startswith(f"{MARK}=".encode())), "")
        if mark and f"FAKE_SLURM={base}".encode() in variables:
            its_job, its_step, its_node = mark.removeprefix(f"{MARK}=").split(".")
            if int(its_job) == job and step in (None, its_step) and node in (None, its_node):
                found[int(entry.name)] = its_step
    return found


def signal_all(identities: list[int], number: int) -> None:
    """A signal to processes, of which some may have ended."""
    for identity in identities:
        with suppress(ProcessLookupError):
            os.kill(identity, number)
