"""Hashes of files that several units read: ranges in any cut give the hash of the whole."""

import hashlib
import itertools

import pytest

from pipeline.contract import content_hash as module
from pipeline.contract.content_hash import content_hash, hash_of_blocks
from tests.block_digests import block_digests


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 640, 1000])
@pytest.mark.parametrize("cuts", [[], [1], [64], [63, 64, 65], [100, 128, 500]])
def test_any_cut_gives_the_hash_of_the_whole(tmp_path, size, cuts, monkeypatch):
    monkeypatch.setattr(module, "BLOCK_BYTES", 64)
    path, data = tmp_path / "file", bytes(index * 7 % 251 for index in range(size))
    path.write_bytes(data)
    edges = [0, *(cut for cut in cuts if cut < size), size]
    parts = [digest for start, stop in itertools.pairwise(edges)
             for digest in block_digests(path, start, stop)]
    blocks = [hashlib.sha256(data[at:at + 64]).digest() for at in range(0, size, 64)]
    assert hash_of_blocks(parts) == f"blocks:{hashlib.sha256(b''.join(blocks)).hexdigest()}"
    assert content_hash(path, hash_of_blocks(parts)) == hash_of_blocks(parts)


def test_a_file_that_one_unit_reads_has_its_sha256(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    assert content_hash(path) == content_hash(path, "0" * 64) == hashlib.sha256(b"abc").hexdigest()
