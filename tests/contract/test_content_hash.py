"""Hashes of files that several units read: ranges in any cut give the hash of the whole."""

import hashlib
import itertools

import pytest

from drover.pipeline.contract.content_hash import content_hash
from drover.pipeline.contract.external_inputs import gathered
from tests.block_digests import block_digests


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 640, 1000])
@pytest.mark.parametrize("cuts", [[], [1], [64], [63, 64, 65], [100, 128, 500]])
def test_any_cut_gives_the_hash_of_the_whole(tmp_path, size, cuts, monkeypatch):
    for name in ("content_hash", "external_inputs"):
        monkeypatch.setattr(f"drover.pipeline.contract.{name}.BLOCK_BYTES", 64)
    path, data = tmp_path / "file", bytes(index * 7 % 251 for index in range(size))
    path.write_bytes(data)
    edges = [0, *(cut for cut in cuts if cut < size), size]
    about = {"name": "s/a", "path": str(path), "bytes": size, "mtime_ns": 5}
    said = [{**about, "whole": False, "start": start, "digests": block_digests(path, start, stop)}
            for start, stop in itertools.pairwise(edges)]
    blocks = [hashlib.sha256(data[at:at + 64]).digest() for at in range(0, size, 64)]
    whole = f"blocks:{hashlib.sha256(b''.join(blocks)).hexdigest()}"
    assert gathered(said[::-1]) == [{**about, "sha256": whole}] and content_hash(path, whole) == whole


def test_a_file_that_one_unit_reads_has_its_sha256(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    assert content_hash(path) == content_hash(path, "0" * 64) == hashlib.sha256(b"abc").hexdigest()
