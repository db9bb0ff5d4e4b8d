"""Zstd data block by block: what stands before damage is all given, and the damage told."""

import io
import random

import pyarrow as pa
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data.zstd_blocks import PACKED, Unzstd
from pipeline.data.zstd_frames import RAW, RLE, block, frame_header
from tests.data.source_files import lines, lost, read, texts

SKIPPED = b"\x53\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"aside"


def some_lines(count):
    rng = random.Random(7)
    return lines({"text": f"{own} {rng.random()} {'and more of it ' * rng.randint(1, 9)}"} for own in range(count))


def pack(data, level=3, checksum=True, known=True):
    return zstandard.ZstdCompressor(level=level, write_checksum=checksum, write_content_size=known).compress(data)


def blocks(packed):
    """(start, end, kind) of each block of one frame."""
    at, found, last = frame_header(packed[4])[0], [], False
    while not last:
        last, kind, length = block(packed[at:at + 3])
        end = at + 3 + (1 if kind == RLE else length)
        found.append((at, end, kind))
        at = end
    return found


def unpacked_of(packed):
    """What can be had of damaged data, and whether it is told to be damaged."""
    given, stream = bytearray(), Unzstd(io.BytesIO(packed))
    while True:
        buffer = bytearray(5000)
        try:
            count = stream.readinto(buffer)
        except OSError as error:
            assert error.errno is None
            with pytest.raises(OSError):
                stream.readinto(buffer)  # it is told for good
            return bytes(given), True
        if not count:
            return bytes(given), False
        given += buffer[:count]


@pytest.mark.parametrize("name", ["text", "noise", "zeros"])
def test_no_whole_block_before_damage_is_lost(name):
    data = {"text": some_lines(9000), "noise": random.Random(1).randbytes(700_000), "zeros": bytes(900_000)}[name]
    packed = pack(data)
    places = blocks(packed)
    assert len(places) > 4
    for start, end, kind in (places[1], places[len(places) // 2], places[-1]):
        # By the library, which is shown no more than the blocks before.
        before = zstandard.ZstdDecompressor().decompressobj().decompress(packed[:start])
        assert len(before) > 0 and data.startswith(before)
        unusable = packed[:start] + (0x7).to_bytes(3, "little") + packed[start + 3:]  # the kind that is reserved
        assert unpacked_of(unusable) == (before, True)
        cut = packed[:end - 1]  # of a block that is stored as it is, what is there of it is had
        assert unpacked_of(cut) == (before + (packed[start + 3:end - 1] if kind == RAW else b""), True)


def test_a_wrong_checksum_or_garbage_behind_costs_nothing():
    data = some_lines(9000)
    packed = pack(data)
    for broken in (packed[:-4] + b"ABCD", packed[:-2], packed + b"hello, you", packed + b"he", packed + packed[:5],
                   packed + packed[:2], packed + SKIPPED[:-1], packed + SKIPPED[:6]):
        assert unpacked_of(broken) == (data, True)


def test_whole_data_is_what_arrow_makes_of_it():
    """Frames of all kinds, with and without checksums and sizes, and such that hold nothing, in pieces of any size."""
    contents = [some_lines(3000), b"", bytes(500_000), random.Random(3).randbytes(300_000), b"x", b"ab" * 300_000]
    packed = SKIPPED.join(pack(data, level, checksum, known) for data in contents for level in (1, 6)
                          for checksum in (True, False) for known in (True, False)) + SKIPPED
    assert len(packed) > 3 * PACKED
    with pa.input_stream(io.BytesIO(packed), compression="zstd") as stream:
        assert unpacked_of(packed) == (stream.read(), False)
    assert unpacked_of(b"") == (b"", False) == unpacked_of(SKIPPED)


@settings(deadline=None)
@given(data=st.binary(max_size=300) | st.integers(0, 900_000).map(bytes), harm=st.integers(0, 2000),
       put=st.binary(min_size=1, max_size=4), cut=st.booleans())
def test_of_damaged_data_no_less_is_had_than_by_any_other_step(data, harm, put, cut):
    packed = bytearray(pack(data) + pack(b"and more" * 30))
    at = harm % len(packed)
    packed[at:] = b"" if cut else put + packed[at + len(put):]
    most, wrong = b"", False
    for step in (1 << 13, 1 << 18):
        had, stream = b"", pa.input_stream(io.BytesIO(bytes(packed)), compression="zstd")
        try:
            while own := stream.read(step):
                had += own
        except OSError:
            wrong = True
        most = max(most, had, key=len)
    given_out, told = unpacked_of(bytes(packed))
    assert given_out.startswith(most) and told == wrong


def test_records_before_the_damage_are_read_and_one_rejection_tells_of_it(tmp_path):
    packed = pack(some_lines(9000))
    (tmp_path / "f.jsonl.zst").write_bytes(packed[:blocks(packed)[3][0]] + b"\xff" * 3)
    documents, rejections = read(tmp_path / "f.jsonl.zst")
    assert lines({"text": text} for text in texts(documents)) == some_lines(len(documents))
    assert lost(rejections) == [(len(documents) + 1, True)] and len(documents) > 100
