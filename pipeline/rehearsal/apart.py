"""Rehearsals in separate processes: a process has only one of torch's process groups, and keeps earlier meshes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from drover.pipeline.config.checks import rank_problems, vocabulary_size
from drover.pipeline.config.tree import Config
from drover.pipeline.core.background import usable_cores
from drover.pipeline.core.errors import NotRehearsedError, UserError, listed
from drover.pipeline.rehearsal.report import Rehearsal


def refuse(config: Config, ranks: int, numbers: Sequence[int]) -> None:
    """Raise a UserError with every reason why these ranks cannot be rehearsed. Without torch.

    ranks: how many there are. numbers: those to be rehearsed.
    """
    if wrong := [number for number in numbers if not 0 <= number < ranks]:
        raise UserError(f"There is no rank {wrong[0]} among {ranks}. Ranks are numbered from 0 to {ranks - 1}.")
    problems = [] if config.parallel.engine == "fsdp2" else [
        "parallel.engine is 'deepspeed', which cannot be rehearsed: it places weights itself, with its own kernels. "
        "Take parallel.engine=fsdp2, or start without a rehearsal."]
    if (config.model.vocab_size or vocabulary_size(config)) is None:
        problems.append("The size of the vocabulary is unknown until the tokenizer exists. Set model.vocab_size.")
    if problems := problems or rank_problems(config, ranks):
        raise UserError(f"This cannot be rehearsed on {ranks} ranks: {listed(problems)}")


def rehearse_apart(config: Config, ranks: int, numbers: Sequence[int], *, gpu: bool = True,
                   all_micro_batches: bool = False) -> list[Rehearsal]:
    """`rehearsal.step.rehearse` of each of these ranks, as many at once as there are cores.

    Raises:
        UserError: see `refuse`. NotRehearsedError: a process was killed, usually for lack of memory.
    """
    refuse(config, ranks, numbers)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["drover.pipeline.rehearsal.step"])  # imported once for all

    def in_a_process(rank: int) -> Rehearsal:
        with ProcessPoolExecutor(1, mp_context=context) as pool:  # max_tasks_per_child is suspected of hangs
            return pool.submit(_rehearse, config, ranks, rank, gpu, all_micro_batches).result()

    with ThreadPoolExecutor(min(len(numbers), usable_cores())) as threads:
        try:
            return list(threads.map(in_a_process, numbers))
        except BrokenProcessPool as error:
            raise NotRehearsedError("A process of the rehearsal was killed. It needs about 1 GB of memory: check that "
                                    "this machine has so much free.") from error


def _rehearse(config: Config, ranks: int, rank: int, gpu: bool, all_micro_batches: bool) -> Rehearsal:
    import warnings

    import torch

    from drover.pipeline.rehearsal.step import rehearse

    warnings.filterwarnings("ignore", module="torch")
    warnings.filterwarnings("ignore", message="Set timeout is now only supported")
    torch.set_num_threads(1)  # nothing is computed
    return rehearse(config, ranks, rank, gpu=gpu, all_micro_batches=all_micro_batches)
