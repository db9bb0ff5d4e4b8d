"""What ranks tell each other arrives as it was told, and nothing else is made of what somebody else has written."""

import json
import pickle
import struct
from dataclasses import is_dataclass
from errno import ENOENT, ENOSPC
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drover.pipeline.contract.signed import MessageError
from drover.pipeline.core.errors import UserError
from drover.pipeline.data.token_shards import Chosen, ShardTable
from drover.pipeline.evaluation.bits_per_byte import ValidationText
from drover.pipeline.formats.sharded_tensors import Entry, Index
from drover.pipeline.parallel.messages import MADE, decode, encode
from drover.pipeline.records.checkpoints import Marker, TrainingProgress
from drover.pipeline.records.metrics import Rollback
from drover.pipeline.storage.mirror import DamagedCopyError
from drover.pipeline.training.data import DamagedTokensError
from tests.formats.exporting import Hostile
from tests.refusal import refused

COUNTS = np.arange(6, dtype=np.int64)
NAN = struct.unpack("<d", bytes.fromhex("010000000000f8ff"))[0]
"""Negative, and with a payload, as processors make them."""
PROGRESS = TrainingProgress(7, 2 ** 40, guards={"window": [1.5]}, record={"loss": 2.0})
SENT = {
    "records": [
        Index(({"path": "rank-0", "bytes": 2 ** 60},),
              {"w": Entry("F32", (4, 2), 0)}, (np.array([[0, 0, 0, 4, 2]]),)),
        Rollback(7, 5, ((1, 2), (9, 12)), "ab", "a spike"),
        Chosen(COUNTS[::2], COUNTS, COUNTS, COUNTS, 9, 2 ** 62),
        ShardTable(COUNTS.reshape(2, 3), np.zeros((0, 32), np.uint8), ["a/\u20ac"], COUNTS.astype(np.int32),
                   (("train", "web", "uint16"),)),
        Marker(2, PROGRESS, [{"path": "rank-0", "bytes": 2 ** 60, "sha256": "ab"}], world_size=2),
        PROGRESS,
        ValidationText([np.array([1, 65535], np.uint16), np.array([], np.uint32)], 12)],
    "errors": [UserError("a\nb"), DamagedCopyError("c"), DamagedTokensError("t"), RuntimeError("d"),
               OSError(ENOSPC, "full", "/x"), None],
    "arrays": [np.float32([NAN, 1]), np.array(2.5), COUNTS.astype(">u8").reshape(3, 1, 2), Path("/runs/\udcff")],
}


def exact(value):
    """A value with all that tells it from others: its types, and the bits of its numbers."""
    if isinstance(value, dict):
        return [dict, *((exact(key), exact(one)) for key, one in value.items())]
    if is_dataclass(value):
        return [type(value), exact(vars(value))]
    if isinstance(value, list | tuple):
        return [type(value), *map(exact, value)]
    if isinstance(value, np.ndarray):
        return [value.dtype, value.shape, value.tobytes(), value.flags.writeable]
    if isinstance(value, Exception):
        return [type(value), str(value), getattr(value, "errno", None)]
    return [type(value), repr(value) if isinstance(value, float) else value]


@pytest.mark.parametrize("kind", SENT)
def test_all_that_ranks_send_each_other_arrives_as_it_was(kind):
    assert exact(decode(encode(SENT[kind]), "rank 1")) == exact(SENT[kind])


def test_the_table_names_nothing_else():
    values = [*SENT["records"], *SENT["errors"][:-1], SENT["records"][0].tensors["w"]]
    assert {type(one).__name__: type(one).__module__ for one in values} == MADE


plain = st.none() | st.booleans() | st.integers() | st.floats() | st.binary() | st.text(
    st.characters(exclude_categories=()))
keys = st.none() | st.integers() | st.sampled_from(["", "a", "!tuple"]) | st.tuples(st.text(max_size=3), st.integers())


@given(st.recursive(plain, lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner)))
def test_plain_values_arrive_to_the_last_bit(value):
    assert exact(decode(encode(value), "rank 1")) == exact(value)


@pytest.mark.parametrize(("sent", "received"), [
    (ValueError("b"), RuntimeError("ValueError: b")),
    (FileNotFoundError(ENOENT, "gone", "x"), OSError(ENOENT, "gone", "x")), (OSError("c"), OSError(5, "c", "")),
    (np.float64(0.1), 0.1), (np.bool_(True), True)])
def test_other_errors_and_numbers_arrive_as_the_nearest(sent, received):
    assert exact(decode(encode(sent), "rank 1")) == exact(received)


@pytest.mark.parametrize("value", [object(), np.array([None]), torch.ones(1)],
                         ids=lambda value: type(value).__name__)
def test_nothing_else_is_sent(value):
    refused(TypeError, f"{type(value).__name__} cannot be sent to other ranks", encode, [value])


def message(plain, content=b""):
    """As `encode` puts it together."""
    text = (plain if isinstance(plain, str) else json.dumps(plain)).encode()
    return struct.pack("<Q", len(text)) + text + content


@pytest.mark.parametrize("hostile", {
    "a pickle": pickle.dumps(Hostile("executed")), "a length without end": b"\xff" * 8 + b"1",
    "no UTF-8": struct.pack("<Q", 1) + b"\xff",
    "deep tuples": message('{"!tuple":[' * 10 ** 5 + "]}" * 10 ** 5),
    "bytes of no length": message({"!bytes": [-1]}, b"x"),
    "an array of objects": message({"!array": [8, "|O", 1]}, bytes(8)),
    "a class of Python's": message({"!Popen": [["touch", "executed"]]}), "no record": message({"!Index": [1, 2, 3, 4]}),
    "a key that is a list": message({"!dict": [[[], 1]]})}.items(), ids=lambda pair: pair[0])
def test_what_somebody_else_has_written_is_refused_and_not_executed(hostile, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(MessageError, "The message from rank 3 cannot be read", decode, hostile[1], "rank 3")
    assert not list(tmp_path.iterdir())
