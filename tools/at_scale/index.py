"""A checkpoint's index for any number of ranks: what each would say of its file, joined as the ranks' tree joins it,
written, and read by one of them. The tensors themselves are not there."""

from __future__ import annotations

import hashlib
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from model.config import ModelConfig
from pipeline.formats.huggingface import parameter_shapes
from pipeline.formats.shard_index import Entry, Index, run_of
from pipeline.formats.sharded_tensors import INDEX, CheckpointReader, write_index
from pipeline.parallel.host_channel import ARITY
from pipeline.parallel.messages import encode
from tools.at_scale.layouts import Owned, saved_by_fsdp, saved_by_zero

STATES = ("model", "exp_avg", "exp_avg_sq")


def index_of_rank(rank: int, shapes: Mapping[str, tuple[int, ...]], owned: Owned, ranks: int) -> Index:
    """What a rank tells of its file."""
    entries: dict[str, Entry] = {}
    for name, shape in shapes.items():
        if found := run_of(0, shape, owned(rank, name)):
            entries |= {f"{state}.{name}": Entry("F32", shape, tuple(found)) for state in STATES}
    for device, size in (("cpu", 5056), ("cuda", 16)):
        row = run_of(0, (ranks, size), [((rank, 0), (1, size))])
        entries[f"random.{device}"] = Entry("U8", (ranks, size), tuple(row))
    record = {"path": f"rank-{rank:05}.safetensors", "bytes": 10**9 + rank,
              "sha256": hashlib.sha256(str(rank).encode()).hexdigest()}
    return Index((record,), entries)


class Tree:
    """Joins the indexes of ranks as `HostChannel` does, and keeps what that costs one rank at most.

    Attributes:
        message: bytes of the longest message, packed.
        join_s: seconds of the root's own joins.
    """

    def __init__(self, leaf: Callable[[int], Index], ranks: int) -> None:
        self.leaf, self.ranks, self.message, self.join_s = leaf, ranks, 0, 0.0

    def joined(self, first: int = 0, size: int | None = None) -> Index:
        """Of the `size` ranks from `first` on."""
        if size is None:
            size = 1
            while size < self.ranks:
                size *= ARITY
        if size == 1:
            return self.leaf(first)
        starts = range(first, min(first + size, self.ranks), size // ARITY)
        parts = [self.joined(start, size // ARITY) for start in starts]
        if first == 0:  # what rank 0 hears
            self.message = max(self.message, *(len(zlib.compress(encode(part), 1)) for part in parts[1:]))
        began = time.perf_counter()
        found = Index.joined(parts)
        if first == 0:
            self.join_s += time.perf_counter() - began
        return found


def measure(model: ModelConfig, ranks: int, layout: str, tensor: int, replicate: int) -> Iterator[str]:
    """Lines of figures."""
    shapes = parameter_shapes(model)
    owned = saved_by_zero(model, ranks) if layout == "zero3" else saved_by_fsdp(model, ranks, tensor, replicate)
    tree = Tree(lambda rank: index_of_rank(rank, shapes, owned, ranks), ranks)
    index = tree.joined()
    pieces = sum(len(run.expanded()[0]) for entry in index.tensors.values() for run in entry.runs)
    with tempfile.TemporaryDirectory() as name:
        began = time.perf_counter()
        written = write_index(Path(name), index)
        write_s = time.perf_counter() - began
        began = time.perf_counter()
        with CheckpointReader(Path(name)) as reader:
            open_s = time.perf_counter() - began
            began, found = time.perf_counter(), 0
            for parameter in shapes:
                for state in STATES:
                    found += sum(len(list(reader.pieces(f"{state}.{parameter}", offset, size)))
                                 for offset, size in owned(ranks // 2, parameter))
            look_s = time.perf_counter() - began
    runs = sum(len(entry.runs) for entry in index.tensors.values())
    yield (f"{layout}, tensor {tensor}, replicate {replicate}, {ranks:,} ranks: {len(index.tensors):,} tensors in "
           f"{pieces:,} pieces are {runs:,} runs; {INDEX} {written['bytes'] / 1e6:.2f} MB")
    yield (f"  rank 0: {tree.join_s:.2f} s to join what it hears, {write_s:.2f} s to prove and write; the longest "
           f"message {tree.message / 1e3:.0f} kB")
    yield (f"  rank {ranks // 2:,}, which goes on: {open_s:.3f} s to open, {look_s:.2f} s to find its {found:,} pieces")
