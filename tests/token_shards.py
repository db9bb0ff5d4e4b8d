"""Token shards made of documents that a test has in hand, and training data over them."""

from itertools import chain, groupby
from unittest.mock import patch

import numpy as np

from drover.pipeline.config.phases import PhasePlan
from drover.pipeline.config.training import TrainConfig
from drover.pipeline.core.files import output_record
from drover.pipeline.data.token_shards import OpenShards, Shards, ShardTable, write_shard

SOURCES = ("web", "code")


def write_documents(path, documents, text_bytes, keys, *, dtype, metadata):
    """`write_shard` of documents that are arrays or lists of ids each."""
    offsets = np.cumsum([0, *(len(ids) for ids in documents)], dtype=np.int64)
    tokens = np.concatenate([np.empty(0, dtype), *(np.asarray(ids, dtype) for ids in documents)])
    return write_shard(path, tokens, offsets, text_bytes, keys, metadata=metadata)


def write_shards(folder, shards, dtype="uint16"):
    """Write shards, each given by a path such as `train/web-00000` and its documents; their output records.

    A document's text had ten bytes a token; its key has the shard's number and its own, 16 digits each.
    """
    records = []
    for number, (name, documents) in enumerate(shards):
        path = folder / f"{name}.arrow"
        keys = [f"{number:016x}{row:016x}" for row in range(len(documents))]
        content = write_documents(path, documents, [10 * len(ids) for ids in documents], keys, dtype=dtype,
                                  metadata={"tokenizer_sha256": "ab"})
        split, _, rest = name.partition("/")
        records.append(output_record(folder, path, split=split, source=rest.rpartition("-")[0], **content))
    return records


def shards_in(folder, records, split, source=None):
    """The shards of a split (and source) that are files in a folder, in the order of their paths."""
    table = records if isinstance(records, ShardTable) else ShardTable.of(records)
    return Shards(OpenShards(table, folder), table.rows(split, source))


def write_numbered(folder, lengths):
    """Training shards of the sources in turn, with documents of these lengths, whose ids number a shard's tokens from
    1. They are in an order that is not that of their paths."""
    return ShardTable.of(write_shards(folder, [
        (f"train/{SOURCES[number % 2]}-{len(lengths) - number:05d}",
         np.split(np.arange(1, sum(own) + 1), np.cumsum(own)[:-1])) for number, own in enumerate(lengths)]))


def plan_of(phases=(), **train):
    """The plan of these settings of train."""
    return PhasePlan.of(TrainConfig.model_validate({"sequence_length": 16, "batch_tokens": 64, "phases": list(phases),
                                                    **train}))


def training_data(folder, table, length=16, mixture=None, packed=False, *, plan=None, opened=None, planner=None,
                  said=None):
    """`TrainingData` over the shards of both sources; without a plan in one phase that no configuration speaks of.
    Packings are planned by one process alone unless `planner` does it."""
    from drover.pipeline.data.sampling.loader import TrainingData
    from drover.pipeline.data.sampling.packing import Alone, make_plan
    opened = OpenShards(table, folder) if opened is None else opened
    shards = {source: Shards(opened, table.rows("train", source)) for source in SOURCES}
    planner = planner or (lambda packing: make_plan(packing, Alone(), [].append if said is None else said.append))
    return TrainingData(shards, plan or plan_of(sequence_length=length, batch_tokens=length, mixture=mixture), 3,
                        table.content("train"), 60_000, (folder / "packing", planner) if packed else None)


def assert_same_batches(one, other):
    """Equal to the last bit, in types too."""
    for name in ("tokens", "labels", "documents", "positions"):
        ours, theirs = getattr(one, name), getattr(other, name)
        assert ours.dtype == theirs.dtype and ours.is_contiguous() and bool((ours == theirs).all()), name
    assert (one.targets, one.lengths, one.padding) == (other.targets, other.lengths, other.padding)


def assert_batch(batch, own, packed, again):
    """A batch of one sequence is what its pieces of documents say. A label is the next token of a document; where
    documents are packed, a piece that was cut and does not fill its sequence has none for its last token. Packed again
    it may have lost that label, too. Documents are packed in pieces as long as the sequence, and what is left."""
    from drover.pipeline.data.sampling.batch import IGNORED
    length, ids = batch.tokens.shape[1], [piece.ids().tolist() for piece in own]
    padding = length - sum(map(len, ids))
    for piece in own if packed and not again else ():
        begin, end = piece.shard.document_span(piece.document)
        assert piece.start % length == 0 and piece.stop == min(piece.start + length, end - begin), "cut, though it fits"
    labels = [label for part in ids for label in (*part[1:], IGNORED)] + [IGNORED] * padding
    begin, end = own[-1].shard.document_span(own[-1].document)
    if not padding and begin + own[-1].stop < end and (not packed or len(own) == 1) and not (
            again and batch.labels[0, -1] == IGNORED):
        labels[-1] = own[-1].shard.tokens(begin + own[-1].stop, end)[0]
    sizes = [*map(len, ids), *[padding][:padding]]
    for name, kind, row in (("tokens", "int64", [*chain.from_iterable(ids), *[0] * padding]),
                            ("labels", "int64", labels),
                            ("documents", "int32", np.repeat(range(len(sizes)), sizes).tolist()),
                            ("positions", "int64", [place for size in sizes for place in range(size)])):
        actual = getattr(batch, name)[0].numpy()
        assert actual.dtype == kind and actual.tolist() == row, name
    assert (batch.targets, batch.lengths, batch.padding) == (
        length - labels.count(IGNORED), (tuple(sizes),), (padding,))


def found_pieces(data, row, document, below):
    """The pieces of a document, looked for in 50 samples at a time."""
    from drover.pipeline.data import provenance
    with patch.object(provenance, "AT_ONCE", 50):
        return list(provenance.pieces_of(data, [(row, document)], below, lambda count: None))


def assert_readings(data, below):
    """Batches are made of the pieces of their samples, and `pieces_of` finds those of each document."""
    from drover.pipeline.data.provenance import pieces
    from drover.pipeline.data.sampling.order import lengths_of
    seen, packed, located = {}, bool(data.packings), data.order.locate(np.arange(below))
    for sample, group in groupby(pieces(data, np.arange(below)), key=lambda piece: piece.sample):
        own, again = list(group), located.space[sample] >= len(lengths_of(data.order.plan))
        assert_batch(data.batch_of(np.array([sample])), own, packed, packed and again)
        for piece in own:
            seen.setdefault((piece.shard.path, piece.document), []).append(piece)
    for shards in data.shards:
        for row, shard in zip(shards.rows.tolist(), shards, strict=True):
            for document in range(shard.documents):
                assert found_pieces(data, row, document, below) == seen.pop((shard.path, document), [])
    assert not seen
