"""Run work in separate processes. A failure, a hang or a lost GPU becomes a message, and memory is not shared."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from drover.pipeline.core.orphans import end_with_parent


class Apart:
    """`work(pipe, *arguments)` in a process for each rank of this node.

    Args:
        ranks: processes to start; with `nodes` above 1 every node starts as many.
        node: number of this node. address, port: where ranks of several nodes meet.
        variables: added to the processes' environment before torch is imported.
        log: file that takes what they print; None: the terminal.
    """

    def __init__(self, work: Callable[..., None], *arguments: Any, ranks: int = 1, node: int = 0, nodes: int = 1,
                 address: str = "127.0.0.1", port: int = 0, variables: Mapping[str, str] | None = None,
                 log: Path | None = None) -> None:
        context, world = get_context("spawn"), ranks * nodes
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = port or free.getsockname()[1]
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(ranks):
            places = {} if world == 1 else {
                "RANK": str(node * ranks + rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
                "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": address, "MASTER_PORT": str(port)}
            ours, theirs = context.Pipe()
            process = context.Process(target=_begin, args=(theirs, {**places, **(variables or {})}, log, work,
                                                           arguments))
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def send(self, value: Any) -> None:
        """Send a value to every rank. `receive` reports ranks that have died."""
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send(value)

    def receive(self, limit_s: float) -> tuple[str, Any]:
        """The next message of any rank: "failed" if one raised or died, "late" after `limit_s` seconds."""
        until = time.monotonic() + limit_s
        while self.pipes and (ready := wait(self.pipes, max(0.0, until - time.monotonic()))):
            pipe = ready[0]
            assert isinstance(pipe, Connection)
            try:
                return pipe.recv()
            except (EOFError, OSError):
                process = self.processes[self.pipes.index(pipe)]
                process.join(5)
                if process.exitcode:
                    return "failed", f"a process ended with status {process.exitcode}"
                self.processes.remove(process)
                self.pipes.remove(pipe)
        return ("late", "took too long; stopped") if self.pipes else ("failed", "the processes ended without a message")

    def end(self) -> None:
        """Stop the processes and their children."""
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(0.5)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid or 0, signal.SIGKILL)
            process.join()


def _begin(pipe: Connection, variables: Mapping[str, str], log: Path | None, work: Callable[..., None],
           arguments: tuple[Any, ...]) -> None:
    os.setpgrp()  # so that its children can be killed with it
    end_with_parent(os.getppid())
    os.environ.update(variables)
    if log is not None:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
    try:
        work(pipe, *arguments)
    except (EOFError, BrokenPipeError):  # the parent has closed the pipe
        return
    except Exception as error:  # noqa: BLE001 - the parent makes a row of it, and the log has the trace
        traceback.print_exc()
        pipe.send(("failed", " ".join(f"{type(error).__name__}: {error}".split())[:300]))
