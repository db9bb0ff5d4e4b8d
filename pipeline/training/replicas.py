"""Whether replicas of the weights are still equal to the last bit: hardware that computes wrong numbers in silence.

Data-parallel replicas receive equal gradients and apply equal updates, so equal weights stay equal, bit for bit. A
fingerprint of each weight is cheap enough to compare now and then; a flipped bit in memory or a wrong product shows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from pipeline.errors import listed
from pipeline.parallel.grid import own
from pipeline.training.engines.engine import LocalWeights

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of the same size, by bytes, as which weights are seen bit by bit."""
CHUNK = 1 << 20
"""Elements hashed at once: bounds the extra memory to some 16 MB."""


@torch.no_grad()
def fingerprint(tensors: Iterable[Tensor]) -> list[int]:
    """A 64-bit number for the bits of each tensor's local part.

    It is the sum of the elements' bits as integers, each times an odd number that grows with its place, modulo 2^64.
    So it does not depend on the order of summation or the device; any change of one element changes it (an odd factor
    loses nothing modulo 2^64), exchanged elements do, and others go unseen once in 2^64 or so.
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


def addends(weights: Iterable[tuple[LocalWeights, int]]) -> list[int]:
    """What a rank adds to sums over all ranks that are `balanced` where copies are equal: four, of 16 bits each.

    Copies of a weight multiply a number made of its fingerprint by factors that add up to 0 modulo 2^64. So all weights
    of all ranks are compared by one sum, which 53 bits hold; something else goes unseen once in 2^50 or so.

    Args:
        weights: that this rank holds copies of, with their fingerprints.
    """
    total = sum(_number(weight.name, weight.place, value)
                * (_number(weight.copy) - _number((weight.copy + 1) % weight.copies)) for weight, value in weights)
    return [total % 2**64 >> 16 * limb & 0xFFFF for limb in range(4)]


def balanced(sums: Iterable[float]) -> bool:
    """Whether the sums of all ranks' `addends` say that copies are equal."""
    return sum(round(value) << 16 * limb for limb, value in enumerate(sums)) % 2**64 == 0


def _number(*of: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(of).encode(), digest_size=8).digest(), "little")


def compare(fingerprints: Sequence[Sequence[int]], names: Sequence[str],
            replicas: Sequence[str] | None = None) -> list[str]:
    """Where replicas differ, a sentence per tensor; empty if they are equal.

    Args:
        fingerprints: of every replica, over the same tensors.
        names: of the tensors.
        replicas: what the replicas are called, e.g. `rank 3 on node7`; by default `replica 0` and so on.
    """
    replicas = replicas or [f"replica {number}" for number in range(len(fingerprints))]
    found = []
    for name, values in zip(names, zip(*fingerprints, strict=True), strict=True):
        groups: dict[int, list[str]] = {}
        for replica, value in zip(replicas, values, strict=True):
            groups.setdefault(value, []).append(replica)
        if len(groups) > 1:
            found.append(f"{name}: {_odd_ones(sorted(groups.values(), key=len, reverse=True), len(values))}")
    return found


def explain(found: Sequence[str], step: int, last_equal: int) -> str:
    """What to tell the user when `compare` found something in `step`; after `last_equal` all was still equal."""
    more = f" (and {len(found) - 3} more)" if len(found) > 3 else ""
    return (f"Training stopped in step {step}: weights that must be equal to the last bit differ between replicas: "
            f"{listed(list(found[:3]))}{more}. No rounding explains that: memory or a processor has gone wrong since "
            f"step {last_equal}, when they were equal; nothing was saved since. Test the machine of the rank that is "
            f"named, or leave it out, and run the same command again: it continues from the last checkpoint.")


def _odd_ones(groups: list[list[str]], count: int) -> str:
    if 2 * len(groups[0]) > count:
        odd = [replica for group in groups[1:] for replica in group]
        return f"{', '.join(odd)} {'differs' if len(odd) == 1 else 'differ'} from the other {len(groups[0])}"
    return f"{' | '.join(', '.join(group) for group in groups)} differ, and which of them is right cannot be told"
