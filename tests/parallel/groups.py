"""Ranks that stay: one start of n processes for any number of cases, one after another.

A server process imports everything once and is forked for every rank (multiprocessing's forkserver), so that a group of
n ranks costs one import and not n. Ranks of a group keep their process group between cases, and nothing else.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from tests.waiting import HANG_S

REPOSITORY = Path(__file__).resolve().parents[2]
ENVIRONMENT = {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
               "TORCHINDUCTOR_COMPILE_THREADS": "1", "DS_ACCELERATOR": "cpu"}
PRELOADED = ["tests.parallel.preloaded"]

MOST_CASES = 16
"""Of a group. Each leaves its process groups behind, whose threads wake up for ever; a new start takes a second."""

_groups: dict[tuple[int, str], Group] = {}


class CaseError(AssertionError):
    """A case ended in an exception; the text is that of the rank that was first."""


def run_case(ranks: int, body: Callable[..., Any], kind: str = "", **settings: Any) -> Any:
    """What rank 0 returns from a function of a module, which every rank calls with its `Ranks` and the settings. Cases
    of the same kind share a start of so many ranks.

    Raises:
        CaseError: a rank failed. The next case gets a new group.
    """
    group = _groups.get((ranks, kind)) or _groups.setdefault((ranks, kind), Group(ranks))
    try:
        result = group.run(body, settings)
    except BaseException:
        _groups.pop((ranks, kind)).end()
        raise
    if group.cases >= MOST_CASES:
        _groups.pop((ranks, kind)).end()
    return result


def end_groups() -> None:
    """Of all kinds and sizes; what comes later starts its own."""
    while _groups:
        _groups.popitem()[1].end()


class Group:
    """`count` processes that have joined one process group."""

    def __init__(self, count: int) -> None:
        context = multiprocessing.get_context("forkserver")
        server = forkserver._forkserver
        if server._preload_modules != PRELOADED:  # another test's, from which each rank would import all anew
            if server._forkserver_pid is not None:  # else it ends only after all ranks that it started
                os.kill(server._forkserver_pid, signal.SIGKILL)
            server._stop()
            context.set_forkserver_preload(PRELOADED)
        with mock.patch.dict(os.environ, ENVIRONMENT):
            forkserver.ensure_running()
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.pipes, self.processes, self.cases = [], [], 0
        for rank in range(count):
            mine, theirs = context.Pipe()
            process = context.Process(target=_rank, args=(rank, count, self.store.port, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)

    def run(self, body: Callable[..., Any], settings: dict[str, Any]) -> Any:
        """One case; see `run_case`."""
        self.cases += 1
        for pipe in self.pipes:
            pipe.send((body, settings))
        answers: dict[int, Any] = {}
        while len(answers) < len(self.pipes):
            waiting = [pipe for rank, pipe in enumerate(self.pipes) if rank not in answers]
            ready = connection.wait(waiting, timeout=HANG_S)
            if not ready:
                raise CaseError(f"ranks {[self.pipes.index(pipe) for pipe in waiting]} hang")
            for pipe in ready:
                rank = self.pipes.index(pipe)
                try:
                    answers[rank], error = pipe.recv()
                except EOFError:
                    raise CaseError(f"rank {rank} died") from None
                if error:
                    raise CaseError(f"rank {rank}: {error}")
        return answers[0]

    def end(self) -> None:
        """Whatever state the ranks are in."""
        for process in self.processes:
            process.kill()
            process.join()


def _rank(rank: int, count: int, port: int, pipe: connection.Connection) -> None:
    from drover.pipeline.parallel.ranks import start_ranks
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count), MASTER_ADDR="127.0.0.1",
                      MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")
    ranks = start_ranks()
    while True:
        try:
            body, settings = pipe.recv()
            pipe.send((body(ranks, **settings), ""))
        except EOFError:  # the tests have ended
            return
        except BaseException:  # noqa: BLE001 - whatever it is, the test is to show it
            pipe.send((None, traceback.format_exc()))
