"""Hashes of files: their sha256, or of those that several units read, the hash of their blocks' hashes."""

import hashlib

from drover.pipeline.contract.content_hash import content_hash
from drover.pipeline.contract.external_inputs import gathered
from tests.block_digests import block_digests


def test_a_file_has_its_sha256_or_the_hash_of_its_blocks_however_it_was_cut(tmp_path, monkeypatch):
    """tests/data/reading/test_parts_of_files.py has other cuts."""
    for name in ("content_hash", "external_inputs"):
        monkeypatch.setattr(f"drover.pipeline.contract.{name}.BLOCK_BYTES", 64)
    path, data = tmp_path / "file", bytes(range(200))
    path.write_bytes(data)
    assert content_hash(str(path)) == content_hash(str(path), "0" * 64) == hashlib.sha256(data).hexdigest()
    blocks = b"".join(hashlib.sha256(data[at:at + 64]).digest() for at in range(0, 200, 64))
    whole = f"blocks:{hashlib.sha256(blocks).hexdigest()}"
    about = {"name": "s/a", "path": str(path), "bytes": 200, "mtime_ns": 5}
    entries = [{**about, "whole": False, "start": start, "digests": block_digests(path, start, stop)}
               for start, stop in ((128, 200), (0, 100), (100, 128))]
    assert content_hash(str(path), whole) == whole and gathered(entries) == [{**about, "sha256": whole}]
