"""Rehearsals in processes of their own: torch has one process group in a process, and remembers meshes of before."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from pipeline.config.tree import Config
from pipeline.errors import NotRehearsedError
from pipeline.rehearsal.report import Rehearsal


def rehearse_apart(config: Config, ranks: int, numbers: Sequence[int], *, gpu: bool = True,
                   all_micro_batches: bool = False) -> list[Rehearsal]:
    """`pipeline.rehearsal.step.rehearse` of each of these ranks, as many at once as there are cores.

    Raises:
        UserError: see there; NotRehearsedError where a process was ended, for want of memory as a rule.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pipeline.rehearsal.step"])  # imported once for all
    workers = min(len(numbers), len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(workers, mp_context=context, max_tasks_per_child=1) as pool:
        try:
            return list(pool.map(_rehearse, *zip(*((config, ranks, rank, gpu, all_micro_batches) for rank in numbers),
                                                 strict=True)))
        except BrokenProcessPool as error:
            raise NotRehearsedError("A rehearsal's process was ended from outside. It takes some 1 GB of memory: is so "
                                    "much free here?") from error


def _rehearse(config: Config, ranks: int, rank: int, gpu: bool, all_micro_batches: bool) -> Rehearsal:
    import warnings

    import torch

    from pipeline.rehearsal.step import rehearse

    warnings.filterwarnings("ignore", module="torch")
    warnings.filterwarnings("ignore", message="Set timeout is now only supported")
    torch.set_num_threads(1)  # nothing is computed
    return rehearse(config, ranks, rank, gpu=gpu, all_micro_batches=all_micro_batches)
