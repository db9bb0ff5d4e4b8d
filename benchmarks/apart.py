"""Call functions in separate processes. A failure, a hang or a lost GPU becomes an error, and memory is not shared."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from multiprocessing import active_children, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TypeVar

from drover.pipeline.core.orphans import end_with_parent

Result = TypeVar("Result")


class FailedError(Exception):
    """A case failed. Its argument: a row that says why."""


class Apart:
    """A process for each of `environments`, whose variables are set before the process imports torch. It keeps its
    state from one call to the next. log: file that takes what the processes print."""

    def __init__(self, environments: Sequence[Mapping[str, str]], log: Path) -> None:
        self._pools = [ProcessPoolExecutor(1, get_context("spawn"), _prepare, (variables, log))
                       for variables in environments]
        self._processes = set[BaseProcess]()

    def call(self, function: Callable[..., Result], *arguments: object, limit_s: float) -> list[Result]:
        """Call a function in every process at the same time; its results.

        Raises:
            FailedError: the function raised it in a process, or a process died, or has not ended after `limit_s`
                seconds. Other processes may still run.
        """
        others = {*active_children()} - self._processes
        try:
            calls = [pool.submit(function, *arguments) for pool in self._pools]
            self._processes |= {*active_children()} - others
            ended, late = wait(calls, limit_s, FIRST_EXCEPTION)
            for call in ended:
                call.result()
        except BrokenProcessPool:
            raise _failed("failed", "a process died; the log may say why") from None
        if late:
            raise _failed("timeout", "took too long; stopped")
        return [call.result() for call in calls]

    def end(self) -> None:
        """Stop the processes and their children."""
        for process in self._processes:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid or 0, signal.SIGKILL)
            process.kill()  # one that has just started has no group of its own yet
        for pool in self._pools:
            pool.shutdown()


def _failed(status: str, note: str) -> FailedError:
    return FailedError({"status": status, "note": note})


def _prepare(variables: Mapping[str, str], log: Path) -> None:
    os.setpgrp()  # so that its children can be killed with it
    end_with_parent(os.getppid())
    os.environ.update(variables)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
