"""Check that replicas of the weights are equal to the last bit: finds hardware that silently computes wrong numbers.

Data-parallel replicas receive equal gradients and apply equal updates, so equal weights stay equal, bit for bit. A
fingerprint of each weight is cheap enough to compare every so many steps. It shows a flipped bit in memory or a wrong
product.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from drover.pipeline.core.console import first
from drover.pipeline.core.errors import UserError
from drover.pipeline.formats.tensor_file import Dims
from drover.pipeline.parallel.grid import own
from drover.pipeline.parallel.ranks import Ranks
from drover.pipeline.training.engine import Engine, LocalWeights
from drover.pipeline.training.hooks import Hook

if TYPE_CHECKING:
    from drover.pipeline.training.loop import Loop

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer type with as many bytes as a weight's element, to read its bits."""
CHUNK = 1 << 20
"""Elements hashed at once. Limits the extra memory to about 16 MB."""


@torch.no_grad()
def fingerprint(tensors: Iterable[Tensor]) -> list[int]:
    """A 64-bit number for the bits of each tensor's local part.

    It is the sum, modulo 2^64, of the elements' bits as integers, each times an odd number that grows with its place.
    So it does not depend on the order of summation or the device. Any change of one element changes it, because an odd
    factor loses nothing modulo 2^64, and so do exchanged elements. Other changes go undetected about once in 2^64.
    """
    sums = [_hash(own(tensor)) for tensor in tensors]
    return [int(value) for value in torch.stack(sums).tolist()] if sums else []


def _hash(tensor: Tensor) -> Tensor:
    flat = tensor.detach().contiguous().view(-1)
    bits = flat.view(INTEGERS[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    odd = 2 * torch.arange(min(CHUNK, len(bits)), dtype=torch.int64, device=bits.device) + 1
    for number, part in enumerate(bits.split(CHUNK)):
        total += (part * odd[:len(part)]).sum() + 2 * CHUNK * number * part.sum(dtype=torch.int64)
    return total


def imbalance(weights: Iterable[tuple[LocalWeights, int]]) -> int:
    """This rank's addend to a sum of 64-bit integers over all ranks, which is 0 if all replicas are equal.

    The replicas of a weight multiply a hash of its fingerprint by factors that add up to 0. So one sum compares all
    weights of all ranks; overflow is intended. A difference goes undetected about once in 2^50.

    Args:
        weights: the replicated weights that this rank holds, with their fingerprints.
    """
    total = 0
    for weight, value in weights:
        mark = hashlib.blake2b(repr((weight.name, weight.place, value)).encode(), digest_size=8)
        total += int.from_bytes(mark.digest(), "little") * (1 if weight.copy else 1 - weight.copies)
    return (total + 2**63) % 2**64 - 2**63


class ReplicaCheck(Hook):
    """Compares replicas every so many steps and before each save.

    nodes: on which each rank runs. every: steps.
    """

    def __init__(self, ranks: Ranks, nodes: Sequence[str], every: int) -> None:
        self.ranks = ranks
        self.every = every
        self._labels = [f"rank {rank} on {node}" for rank, node in enumerate(nodes)]
        self._last_equal = 0

    def on_start(self, loop: Loop) -> None:
        """See Hook."""
        self._last_equal = loop.progress.step

    def before_update(self, loop: Loop) -> None:
        """Compare if due in this step. It comes before the update, since ZeRO's update overwrites all replicas of a
        weight, and so hides that one was wrong."""
        step = loop.progress.step + 1
        self._last_equal = min(self._last_equal, step - 1)  # after a rollback
        if step % self.every == 0:
            self.compare(loop.engine, step)

    def on_save(self, loop: Loop) -> None:
        """Compare before one of the replicas is saved."""
        self.compare(loop.engine, loop.progress.step)

    def compare(self, engine: Engine, step: int) -> None:
        """Stop if weights that several ranks hold are not equal to the last bit. One all-reduce detects a difference;
        only then do all ranks send their fingerprints to rank 0.

        Raises:
            UserError: replicas differ; names the weights and the ranks.
        """
        held = list(engine.replicated_weights())  # in a pipeline, some ranks may hold replicas while others do not
        values = fingerprint(weight.tensor for weight in held)
        total = torch.tensor(imbalance(zip(held, values, strict=True)), device=self.ranks.device)
        dist.all_reduce(total)
        if int(total):
            collected = self.ranks.collect([(weight.name, weight.place, value)
                                            for weight, value in zip(held, values, strict=True)])
            if result := self.ranks.same(differences(self._labels, collected)):
                raise UserError(explain(result, step, self._last_equal))
        self._last_equal = step


def differences(labels: Sequence[str], held: Sequence[Sequence[tuple[str, Dims, int]]]) -> list[str]:
    """A sentence for each weight whose replicas differ, with the ranks of equal ones; the fewest first.

    Args:
        labels: the ranks' names, e.g. `rank 3 on node7`.
        held: by rank, (name, place, fingerprint) of each replicated weight.
    """
    ranks = defaultdict[tuple[str, Dims], defaultdict[int, list[str]]](lambda: defaultdict(list))
    for label, weights in zip(labels, held, strict=False):  # `held` is empty on all ranks but rank 0
        for name, place, value in weights:
            ranks[name, place][value].append(label)
    return [f"{name}: {' differs from '.join(first(group) for group in sorted(by_value.values(), key=len))}"
            for (name, _), by_value in ranks.items() if len(by_value) > 1]


def explain(weights: Sequence[str], step: int, last_equal: int) -> str:
    """The error message for `differences` in step `step`; after step `last_equal` all replicas were equal."""
    return (f"Training stopped in step {step}: weights that must be equal to the last bit differ between replicas: "
            f"{first(weights)}. Rounding cannot cause this: memory or a processor has failed since "
            f"step {last_equal}, when they were equal. Nothing was saved since then. Test the machines of the ranks "
            f"that are alone, or exclude them, and run the same command again: it continues from the last checkpoint.")
