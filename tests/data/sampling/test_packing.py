"""Documents packed by best fit: every token once, none cut without need; a plan that is found, remade or refused."""

from __future__ import annotations

import gc
import json
import os
import pickle
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.attention.by_document import ByDocument
from model.attention.sdpa import Sdpa
from model.config import ModelConfig
from model.llama import Llama, initialise
from pipeline.config.data import FilesSource, ShardConfig
from pipeline.config.training import TrainConfig
from pipeline.config.tree import Config
from pipeline.data.provenance import pieces, readings
from pipeline.data.sampling.batch import IGNORED
from pipeline.data.sampling.loader import TrainingData
from pipeline.data.sampling.packing_plan import INDEX, Alone, Planning, make, read
from pipeline.data.shard_table import OpenShards, Shards, ShardTable
from pipeline.errors import UserError
from pipeline.files import output_record
from pipeline.training.data.opening import refuse_beyond
from tests.model.varlen_on_cpu import VarlenOnCpu
from tests.token_shards import write_documents
from tools.audit import Audit, _sequences

SOURCES = ("web", "code")


def make_shards(folder, documents):
    """A table of shards; documents: lengths of each shard's, whose ids number its tokens within it, from 1."""
    records = []
    for number, lengths in enumerate(documents):
        source = SOURCES[number % 2]
        path = folder / f"train/{source}-{len(documents) - number:05d}.arrow"
        ids = np.split(np.arange(1, sum(lengths) + 1), np.cumsum(lengths)[:-1])
        content = write_documents(path, ids, [1] * len(lengths),
                                  [f"{number:016x}{row:016x}" for row in range(len(lengths))], dtype="uint16",
                                  metadata={})
        records.append(output_record(folder, path, split="train", source=source, **content, input="x",
                                     input_sha256="y"))
    return ShardTable.of(records)


def said_by(folder, table, length=16):
    """The packing, and what was said."""
    said: list[str] = []
    return make(Planning.whole(folder / "plan", OpenShards(folder, table), length), Alone(), said.append), said


def read_packing(folder, shards, length, say):
    return read(Planning.whole(folder, shards, length), say)


def data_of(folder, table, packing, mixture=None):
    opened, length = OpenShards(folder, table), 16 if packing is None else packing.length
    return TrainingData({source: Shards(opened, table.rows("train", source)) for source in SOURCES}, length, 3,
                        mixture, table.content("train"), 60_000, packing)


@given(documents=st.lists(st.lists(st.integers(0, 70), min_size=1, max_size=25), min_size=2, max_size=4).filter(
    lambda shards: sum(map(sum, shards[::2])) and sum(map(sum, shards[1::2]))), length=st.integers(1, 24),
    mixed=st.booleans())
@settings(max_examples=40, deadline=None)
def test_every_token_once_an_epoch_and_every_label_of_its_own_document(tmp_path_factory, documents, length, mixed):
    folder = tmp_path_factory.mktemp("shards")
    table = make_shards(folder, documents)
    data = data_of(folder, table, said_by(folder, table, length)[0], dict.fromkeys(SOURCES, 1.0) if mixed else None)
    once = {(shard, token): 0 for shard, sizes in enumerate(documents) for token in range(1, sum(sizes) + 1)}
    predicted, whole = dict.fromkeys(once, 0), {}
    for shard, sizes in enumerate(documents):
        for begin, size in zip(np.cumsum([1, *sizes]).tolist(), sizes, strict=False):
            whole |= {(shard, token): (begin, size) for token in range(begin, begin + size)}
    rows = {table.path(row).rpartition("/")[2]: row for row in range(len(table))}
    for stream, count in zip(data.streams, data.order.counts.tolist(), strict=True):
        for number in range(count):
            row, spans = np.zeros(length + 1, np.uint32), stream.spans(number)
            starts, used = stream.fill(number, row)
            [shard] = {rows[span.shard.path.name] for span in spans}
            read = np.concatenate([span.shard.tokens(span.start, span.stop) for span in spans])
            assert np.array_equal(read, row[:used]) and not row[used:length].any()
            for token in row[:used].tolist():
                once[shard, token] += 1
            for span in spans:
                begin, size = whole[shard, span.start + 1]
                assert span.stop - span.start == min(length, begin + size - span.start - 1)
                assert (span.start + 1 - begin) % length == 0, "cut, though it fits"
            for place in set(range(used)) - {start - 1 for start in starts.tolist()}:
                assert row[place + 1] == row[place] + 1
                predicted[shard, int(row[place + 1])] += 1
                found, at = stream.place(number, place + 1)
                assert rows[found.path.name] == shard and found.tokens(at, at + 1)[0] == row[place + 1]
    assert set(once.values()) == {1}
    assert {key for key, times in predicted.items() if times != 1} == {
        (shard, begin) for (shard, _), (begin, _) in whole.items()}, "all but a document's first token, once"


def test_a_batch_of_bins_has_padding_that_nobody_learns_from(tmp_path):
    table = make_shards(tmp_path, [[30, 5, 9, 16, 3], [7, 40]])
    data = data_of(tmp_path, table, said_by(tmp_path, table)[0])
    count = int(data.order.counts.sum())
    batch = data.batch(0, count)
    assert sum(batch.padding) == 16 * count - 110 > 0
    assert batch.targets == int((batch.labels != IGNORED).sum()) == 110 - 7, "each document's tokens but its first"
    for row, padding in enumerate(batch.padding):
        assert not batch.tokens[row, 16 - padding:].any() and (batch.labels[row, 16 - padding:] == IGNORED).all()
        assert batch.lengths[row][-1] == padding or not padding
        assert list(batch.lengths[row]) == batch.documents[row].unique_consecutive(return_counts=True)[1].tolist()
        own = [list(range(length)) for length in batch.lengths[row]]
        assert batch.positions[row].tolist() == [place for places in own for place in places]
    parts = list(batch.split(3))
    assert [padding for part in parts for padding in part.padding] == list(batch.padding)
    assert sum(part.targets for part in parts) == batch.targets


def test_the_plan_is_part_of_what_the_order_is(tmp_path):
    table = make_shards(tmp_path, [[30, 5, 9, 16, 3], [7, 40]])
    packing = said_by(tmp_path, table)[0]
    plans = [data_of(tmp_path, table, made).order.plan_sha256 for made in (packing, None)]
    packing.sha256[0, 0] ^= 1
    plans.append(data_of(tmp_path, table, packing).order.plan_sha256)
    assert len(set(plans)) == 3


def test_figures_are_counted(tmp_path):
    table = make_shards(tmp_path, [[16, 10, 6, 33], [0, 20]])
    figures = said_by(tmp_path, table)[0].figures()
    assert figures == {"sequences": 7, "padding_share": 1 - 85 / (7 * 16), "documents": 5, "documents_cut": 2,
                       "cut_share": 0.4}


def test_a_plan_is_made_once_and_read_again(tmp_path):
    table = make_shards(tmp_path, [[30, 5, 9, 16, 3], [7, 40], [3]])
    first, said = said_by(tmp_path, table)
    assert said == ["planned the best-fit packing of 3 of 3 token shards: they were not planned before"]
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "plan").rglob("*") if path.is_file()}
    assert len(files) == 4
    again, said = said_by(tmp_path, table)
    for found in (again, read_packing(tmp_path / "plan", OpenShards(tmp_path, table), 16, said.append)):
        assert np.array_equal(found.numbers, first.numbers) and np.array_equal(found.sha256, first.sha256)
    assert said == [] and files == {path: path.stat().st_mtime_ns for path in files}


@pytest.mark.parametrize(("mixture", "limits", "refused"), [
    (None, {"web": 1}, "allows 1 of web, and the plan takes 2.28 (194 of 85 tokens of all sources)"),
    (None, 2, "allows 2 of all sources, and the plan takes 2.28"), (None, {"web": 3, "code": 2.5}, None),
    ({"web": 1, "code": 1}, {"code": 3}, "allows 3 of code, and the plan takes 4."),
    ({"web": 1, "code": 1}, {"web": 3}, None)])
def test_limits_of_epochs_hold_for_packed_sequences_too(tmp_path, mixture, limits, refused):
    table = make_shards(tmp_path, [[16, 10, 6, 33], [0, 20]])
    data, said = data_of(tmp_path, table, said_by(tmp_path, table)[0], mixture), []
    config = Config(shard=ShardConfig(sources=[FilesSource(kind="files", name=name, paths=["x"]) for name in SOURCES]),
                    train=TrainConfig(sequence_length=16, batch_tokens=64, steps=4, packing="best_fit", mixture=mixture,
                                      max_epochs=limits))
    with pytest.raises(UserError, match=re.escape(refused)) if refused else nullcontext():
        refuse_beyond(config, {}, data, said.append)
    assert said[0].startswith("  web: " if mixture else "  all sources: ")


@pytest.mark.parametrize(("harm", "said"), [("none", "they were not planned before"), ("torn", "is torn"),
                                            ("other", "is of other shards")])
def test_who_only_reads_a_plan_makes_it_elsewhere(tmp_path, harm, said):
    table = make_shards(tmp_path, [[30, 5, 9, 16, 3], [7, 40]])
    if harm != "none":
        said_by(tmp_path, table, length=16 if harm == "torn" else 32)
        index = tmp_path / "plan" / INDEX
        index.write_bytes(index.read_bytes()[:40 if harm == "torn" else None])
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    told = []
    own = read_packing(tmp_path / "plan", OpenShards(tmp_path, table), 16, told.append)
    assert said in told[0] and "made for this time alone" in told[0]
    read, place = data_of(tmp_path, table, own).batch(0, 4).tokens, own.folder
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == files
    del own
    gc.collect()
    assert not place.exists()
    kept, _ = said_by(tmp_path, table)
    assert torch.equal(read, data_of(tmp_path, table, kept).batch(0, 4).tokens)


@pytest.mark.parametrize("damage", ["cut", "flip", "remove"])
def test_a_damaged_plan_of_a_shard_is_made_anew(tmp_path, damage):
    table = make_shards(tmp_path, [[30, 5, 9, 16, 3], [7, 40], [3]])
    first, _ = said_by(tmp_path, table)
    content = first.path(1).read_bytes()
    if damage == "remove":
        first.path(1).unlink()
    else:
        first.path(1).write_bytes(content[:-1] if damage == "cut" else content[:-1] + bytes([content[-1] ^ 1]))
    if damage == "cut":
        with pytest.raises(UserError, match="is torn: it has"):
            data_of(tmp_path, table, first).batch(0, 8)
    _, said = said_by(tmp_path, table)
    assert said == ["planned the best-fit packing of 1 of 3 token shards: their files were missing or damaged"]
    assert first.path(1).read_bytes() == content


@pytest.mark.parametrize("damage, why", [("torn", "index.json is torn (JSONDecodeError)"),
                                         ("changed", "index.json was changed"),
                                         ("other", "index.json is of other shards"),
                                         ("missing", "they were not planned before")])
def test_a_damaged_index_is_said_and_all_is_planned_again(tmp_path, damage, why):
    table = make_shards(tmp_path, [[30, 5, 9, 16, 3], [7, 40], [3]])
    first, _ = said_by(tmp_path, table)
    path = tmp_path / "plan" / INDEX
    whole = json.loads(path.read_text())
    if damage == "torn":
        os.truncate(path, 100)
    elif damage == "missing":
        path.unlink()
    else:
        if damage == "changed":
            whole["plans"][table.path(0)][0] += 1
        else:
            whole["shards_sha256"] = "0" * 64
        path.write_text(json.dumps(whole))
    again, said = said_by(tmp_path, table)
    [line] = said
    assert line.startswith("planned the best-fit packing of 3 of 3 token shards: ") and line.endswith(why)
    assert np.array_equal(again.sha256, first.sha256) and said_by(tmp_path, table)[1] == []


def test_a_shard_that_gives_another_plan_is_refused(tmp_path):
    table = make_shards(tmp_path, [[30, 5, 9, 16, 3], [7, 40], [3]])
    first, _ = said_by(tmp_path, table)
    first.path(0).unlink()
    record = table.record(0)
    with open(tmp_path / record["path"], "r+b") as file:
        file.seek(record["offsets_offset"] + 8)
        file.write((29).to_bytes(8, "little"))
    with pytest.raises(UserError, match=r"gives another plan of its packing than .*index.json has"):
        said_by(tmp_path, table)


def test_ranks_plan_together_what_one_plans_alone(tmp_path):
    """Each of three does its part, none writes another's, and all end up with the same."""
    import threading
    table = make_shards(tmp_path, [[30, 5, 9, 16, 3], [7, 40], [3], [20, 20], [9]])
    alone = said_by(tmp_path, table)[0]
    barrier, boxes = threading.Barrier(3), [None] * 3

    class Together:
        def __init__(self, rank):
            self.rank, self.world = rank, 3

        def gather(self, value):
            boxes[self.rank] = value
            barrier.wait(60)
            found = pickle.loads(pickle.dumps(boxes))  # as ranks do: what comes back is another object
            barrier.wait(60)
            return found

    said: list[str] = []

    def together(rank):
        return make(Planning.whole(tmp_path / "other", OpenShards(tmp_path, table), 16), Together(rank), said.append)

    with ThreadPoolExecutor(3) as pool:
        made = list(pool.map(together, range(3)))
    assert len(said) == 1 and all(np.array_equal(each.sha256, alone.sha256) for each in made)
    assert all(np.array_equal(each.numbers, alone.numbers) for each in made)
    index = [(tmp_path / folder / INDEX).read_text() for folder in ("plan", "other")]
    assert index[0] == index[1]
    with ThreadPoolExecutor(3) as pool:
        again = list(pool.map(together, range(3)))
    assert len(said) == 1 and all(each.table is table for each in again)
    (tmp_path / table.path(3)).unlink()
    made[0].path(3).unlink()

    def refused(rank):
        with pytest.raises(UserError, match="cannot be read"):
            together(rank)
        return True

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(refused, range(3)))


def test_pieces_of_packed_samples_are_the_documents_in_them(tmp_path):
    table = make_shards(tmp_path, [[30, 5, 9, 16, 3], [7, 40]])
    data = data_of(tmp_path, table, said_by(tmp_path, table)[0])
    numbers = np.arange(int(data.order.counts.sum()))
    batch, found = data.batch_of(numbers), list(pieces(data, numbers))
    for row, padding in enumerate(batch.padding):
        ids = [piece.ids() for piece in found if piece.sample == row]
        assert np.concatenate(ids).tolist() == batch.tokens[row, :16 - padding].tolist()
    cut = {(piece.shard.path, piece.document) for piece in found
           if (piece.start, piece.stop) != (0, np.diff(piece.shard.document_span(piece.document))[0])}
    assert len(cut) == 2, "of 30 and of 40 tokens"


def test_an_id_outside_the_vocabulary_is_found_in_its_document(tmp_path):
    table = make_shards(tmp_path, [[30, 5, 9], [7, 40]])
    data = data_of(tmp_path, table, said_by(tmp_path, table)[0])
    data.vocabulary = 47
    key = f"{1:016x}{1:016x}"
    with pytest.raises(UserError, match=rf"code-00001.arrow holds the id 47 at its token 46 \(document 1, key {key}\)"):
        data.batch(0, int(data.order.counts.sum()))


def alone(model, batch):
    """The loss of every piece of a packed batch, each by itself, in a row of its own."""
    loss = torch.zeros((), dtype=torch.float64)
    for row, lengths in enumerate(batch.lengths):
        at = 0
        for length in lengths:
            own = slice(at, at + length)
            tokens, labels = batch.tokens[row:row + 1, own], batch.labels[row:row + 1, own]
            if bool((labels != IGNORED).any()):
                loss = loss + model(tokens, labels)
            at += length
    return loss


@pytest.mark.parametrize("backend", [Sdpa(), ByDocument(), VarlenOnCpu()], ids=lambda backend: backend.name)
def test_gradients_of_a_packed_batch_are_those_of_its_documents_one_by_one(tmp_path, backend):
    config = ModelConfig(dim=48, layers=2, heads=6, kv_heads=2, ffn_dim=64, vocab_size=128, context_length=32)
    model = Llama(config).double()
    initialise(model, config, seed=0)
    table = make_shards(tmp_path, [[30, 5, 9, 16, 3, 1], [7, 40, 2]])
    data = data_of(tmp_path, table, said_by(tmp_path, table)[0])
    batch = data.batch(0, int(data.order.counts.sum()))
    apart = alone(model, batch)
    model.backend = backend
    packed = model(batch.tokens, batch.labels, documents=batch.documents, positions=batch.positions,
                   document_lengths=[length for row in batch.lengths for length in row])
    assert torch.isfinite(packed) and abs(packed - apart) < 1e-10 * abs(apart)
    for ours, theirs in zip(torch.autograd.grad(packed, list(model.parameters())),
                            torch.autograd.grad(apart, list(model.parameters())), strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-10)


@given(documents=st.lists(st.lists(st.integers(0, 70), min_size=1, max_size=25), min_size=2, max_size=4).filter(
    lambda shards: sum(map(sum, shards[::2])) and sum(map(sum, shards[1::2]))), length=st.integers(1, 24),
    mixed=st.booleans())
@settings(max_examples=20, deadline=None)
def test_a_documents_readings_are_the_pieces_that_name_it(tmp_path_factory, documents, length, mixed):
    folder = tmp_path_factory.mktemp("shards")
    table = make_shards(folder, documents)
    data = data_of(folder, table, said_by(folder, table, length)[0], dict.fromkeys(SOURCES, 1.0) if mixed else None)
    below, seen = int(2.5 * data.order.counts.sum()), {}
    epochs = data.order.locate(np.arange(below))[1]
    for piece in pieces(data, np.arange(below)):
        seen.setdefault((piece.shard.path, piece.document), []).append(
            (piece.sample, int(epochs[piece.sample]), piece.start, piece.stop))
    for pool, stream in enumerate(data.streams):
        for index, shard in enumerate(stream.shards):
            for document in range(shard.documents):
                found = readings(data, pool, index, document, below)
                assert [(one.sample, one.epoch, one.start, one.stop) for one in found] == \
                    seen.pop((shard.path, document), [])
    assert not seen


def test_the_audit_counts_packed_sequences_however_many_there_are(tmp_path):
    """Documents of 9 tokens leave 7 of 16 empty: more sequences than their tokens would fill."""
    table = make_shards(tmp_path, [[9] * 40, [9] * 40])
    order = data_of(tmp_path, table, said_by(tmp_path, table)[0]).order
    assert order.counts.tolist() == [80] and order.pools[0].tokens // 16 == 45
    proven, twice = Audit(), Audit()
    _sequences(order, [(0, 200)], proven)
    _sequences(order, [(0, 200), (81, 83)], twice)
    assert proven.faults == [] and len(twice.faults) == 2
    assert all(fault.startswith("sequence ") and " came 2 times in epoch 1" in fault for fault in twice.faults)
