"""What runs on a host without Slurm: it tries the shared folder, or starts the host's ranks.

`drover.launch.hosts` starts it over ssh (`ssh_command`). The task is the first line of the input, in JSON, so that no
secret stands on a command line. After it the launcher sends an empty line now and then, and `end` to ask the ranks to
save and end. Once the input is closed, or silent for SILENT_S, the ranks are killed: the launcher is gone, or starts
them elsewhere. Answers are lines of JSON on stderr. The output of rank 0 goes to stdout as well as to the log of its
node.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from drover.launch.processes import Environment, Group, free_port, pass_on, started, variables_of
from drover.launch.slurm.start_logs import Labelled
from drover.pipeline.contract.stages import REPOSITORY
from drover.pipeline.core.files import Record, sha256_file, sha256_json

MARK = "drover-host "
"""How a line of an answer begins."""
SILENT_S = 30.0
"""After so long without a word the launcher counts as gone. ssh itself gives a host up later (`hosts.SSH`), when its
ranks are dead. If the launcher ends the ssh of a host that does not answer, ranks there may run for that long."""
SEEN_S = 10.0
"""How long a new file of the run folder may take to be seen from another machine."""


@dataclass(frozen=True)
class Work:
    """The ranks that a host starts. ranks: on all hosts; 0: one process without ranks. here: ranks on each. number: of
    the host."""

    stage: str
    command: tuple[str, ...]
    environment: Environment
    log: str
    ranks: int
    here: int
    number: int


def try_folder(token: Path, number: int) -> Record:
    """Look for the launcher's file `token`, and leave one next to it that names this host by its number.

    Returns:
        Whether the file was seen, free ports for two starts, the address at which the launcher reached this host, and
        the hash of the code here.
    """
    until = time.monotonic() + SEEN_S
    while not token.exists() and time.monotonic() < until:
        time.sleep(0.2)
    if seen := token.exists():
        token.with_suffix(f".{number}").touch()
    return {"seen": seen, "ports": [free_port(), free_port()], "code": code_hash(),
            "address": "".join(os.environ.get("SSH_CONNECTION", "").split()[2:3])}


def code_hash() -> str:
    """Hash of the source files of Drover that a stage runs, as this machine has them."""
    return sha256_json({path.relative_to(REPOSITORY).as_posix(): sha256_file(path)
                        for part in ("launch", "model", "pipeline") for path in (REPOSITORY / part).rglob("*.py")})


def do(work: Work, given: int) -> int:
    """Start the ranks and wait for their end; the exit status of the first that failed. given: the input."""
    environment, asked, told = {**os.environ, **work.environment}, list[int](), 0
    first = work.number * work.here
    own = variables_of(work.ranks, work.here, work.number)
    program = [sys.executable, "-m", "drover.launch.slurm.job.rank", work.stage, *work.command]
    with open(work.log, "wb", buffering=0) as log, open(os.devnull, "w") as nowhere:
        pipes = [os.pipe() for _ in own]
        readers = [threading.Thread(daemon=True, target=pass_on, args=(
            *pipe, nowhere if rank else sys.stdout, Labelled(log, rank))) for rank, pipe in enumerate(pipes, first)]
        group = Group([started(program, {**environment, **more}, write, write)
                       for more, (_, write) in zip(own, pipes, strict=True)], asked=asked, readers=readers)
        threading.Thread(daemon=True, target=_listen, args=(given, asked)).start()

        def tell_failures() -> bool:
            nonlocal told
            for local, status in group.failed[told:]:
                _answer({"rank": first + local, "status": status})
            told = len(group.failed)
            return True

        group.run(tell_failures)
        tell_failures()
    return group.status


def answers(said: str) -> Iterator[Record]:
    """What a host answered, from what its ssh wrote to stderr."""
    whole = said[:said.rfind("\n") + 1].splitlines()
    return (json.loads(line.removeprefix(MARK)) for line in whole if line.startswith(MARK))


def _listen(given: int, asked: list[int]) -> None:
    """Hear the launcher out: one request to end, then the end of the link, which kills."""
    while select.select([given], [], [], SILENT_S)[0] and (said := os.read(given, 4096)):
        if said.strip() and not asked:
            asked.append(signal.SIGTERM)
    asked += [signal.SIGTERM, signal.SIGTERM]


def _answer(found: Record) -> None:
    with suppress(OSError):  # the link is broken: the ranks are about to be ended, in order
        print(f"{MARK}{json.dumps(found)}", file=sys.stderr, flush=True)


def main() -> int:
    """Do the task that is given."""
    with open(0, "rb", buffering=0, closefd=False) as given:
        task = json.loads(given.readline())
    if "token" in task:
        _answer(try_folder(Path(task["token"]), task["number"]))
        return 0
    return min(do(Work(**task), 0), 1)  # 255 would mean that ssh failed; the rank's own status is in the answer


def line_of(work: Work) -> bytes:
    """A task as it is given."""
    return json.dumps(asdict(work)).encode() + b"\n"


if __name__ == "__main__":
    sys.exit(main())
