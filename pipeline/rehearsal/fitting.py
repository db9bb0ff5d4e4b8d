"""Rehearsals in processes of their own: whether a step fits a GPU, and which settings would make it fit.

A process has only one of torch's process groups, and keeps earlier meshes.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice

from drover.pipeline.config.checks import problems, rank_problems, vocabulary_size
from drover.pipeline.config.phases import BatchPlan, with_largest
from drover.pipeline.config.tree import Config, changed
from drover.pipeline.core.background import usable_cores
from drover.pipeline.core.console import readable
from drover.pipeline.core.errors import NotRehearsedError, UserError, listed
from drover.pipeline.rehearsal.report import Rehearsal, ends_and_middle, fullest


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


TIGHT = 0.9
"""The share of a GPU's memory that a rehearsed step may use. The rest is for what is not estimated."""
TRIED, ENOUGH, SEARCH_S = 6, 3, 120.0
"""The search for settings that fit ends after so many rehearsals, so many that fit, or so many seconds."""
Settings = dict[str, object]
"""Values of a configuration, by `section.key`."""
LONG = 32768
"""Sequences of at least so many tokens are split over ranks (cp) before products are (tp)."""


def fit_in_memory(config: Config, rehearsal: Rehearsal, memory: float, *, gpu: bool = True) -> tuple[bool, str]:
    """Whether a rank fits a GPU with `memory` bytes, and a sentence about it. If it does not fit, the sentence names
    the largest item, and settings that fit, each of them rehearsed."""
    size, has = readable(rehearsal.peak.bytes), readable(memory)
    if rehearsal.peak.bytes <= memory:
        return True, (f"{size} of {has}: it fits; memory that is not estimated (CUDA's context, NCCL's buffers, "
                      f"fragmentation) takes some GB more")
    largest = max(rehearsal.peak.kinds, key=lambda kind: rehearsal.peak.kinds[kind])
    config = with_largest(config, rehearsal.ranks)
    item = next(item for item in rehearsal.peak.items if item.kind == largest)
    message = (f"rank {rehearsal.rank:,} would hold {size} where a GPU has {has}. The largest part is {largest}, "
            f"{readable(rehearsal.peak.kinds[largest])}, above all {item}.")
    return False, f"{message} {_advice(config, rehearsal, largest, memory, gpu)}"


def _advice(config: Config, rehearsal: Rehearsal, largest: str, memory: float, gpu: bool) -> str:
    """Settings that were rehearsed and fit; if none does, those that do not, each with its peak or error."""
    until = time.monotonic() + SEARCH_S
    fitting: list[str] = []
    others: list[str] = []
    for settings in islice(ways(config, rehearsal, largest), TRIED):
        if len(fitting) == ENOUGH or time.monotonic() > until:
            break
        other = changed(config, settings)
        numbers = sorted({rehearsal.rank, *ends_and_middle(other, rehearsal.ranks)})
        try:
            peak = fullest(rehearse_apart(other, rehearsal.ranks, numbers, gpu=gpu)).peak.bytes
        except Exception as error:  # noqa: BLE001 - reported; the job does not fit in any case
            others.append(f"{named(settings)} ({(str(error).splitlines() or [type(error).__name__])[0]})")
            continue
        (fitting if peak <= TIGHT * memory else others).append(f"{named(settings)} ({readable(peak)})")
    if fitting:
        return f"Rehearsed as well, and fitting: {', or '.join(fitting)}."
    if others:
        return f"Rehearsed as well, but not fitting: {', '.join(others)}. Combine such settings, or take more ranks."
    return "Take more ranks."


def ways(config: Config, rehearsal: Rehearsal, largest: str) -> Iterator[Settings]:
    """Settings that need less memory: single ones first, those without recomputation and further collectives before
    others, then several together."""
    train, parallel = config.train, config.parallel
    micro_batch = BatchPlan.of(train, parallel, rehearsal.ranks).micro_batch
    kinds = ("none", "selective", "full")
    checkpointing: list[Settings] = [{"train.activation_checkpointing": kind} for kind in
                                     kinds[kinds.index(train.activation_checkpointing) + 1:]]
    single: list[Settings] = []
    if largest in ("activations", "pipeline buffers"):
        single = [{"train.micro_batch": micro_batch // 2}, *checkpointing]
    elif largest != "logits":
        single = [{"parallel.dp_replicate": 1}, {"parallel.reduce": "each"}, {"parallel.reshard": "always"}]
    axes = ("cp", "tp") if train.sequence_length >= LONG else ("tp", "cp")
    split: list[Settings] = [{f"parallel.{axis}": size} for size in (2, 4, 8, 16) for axis in axes
                             if size > getattr(parallel, axis)]
    together: Settings = dict(checkpointing[-1]) if checkpointing else {}
    for settings in (*single, *split[:2], *({**together, **way} for way in (split[2:] if together else split))):
        if possible(config, settings, rehearsal.ranks):
            yield settings


def possible(config: Config, settings: Settings, ranks: int) -> bool:
    """Whether the settings change anything, and cause no new problem on so many ranks."""
    try:
        other = changed(config, settings)
        return (other != config and set(problems(other)) <= set(problems(config))
                and not rank_problems(other, ranks))
    except ValueError:
        return False


def named(settings: Settings) -> str:
    """Settings in the form of the command line."""
    return " ".join(f"{key}={value}" for key, value in settings.items())
