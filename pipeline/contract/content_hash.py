"""The hash that identifies a file's content. It is the file's sha256. If several units each read a range of the file,
it is a hash of the hashes of its blocks, which the units compute while they read.

The hash itself says which of the two it is, so the file can be compared with it later.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from drover.pipeline.storage.object_files import open_input

BLOCK_BYTES = 1 << 23
"""Size of a block. It never changes, because recorded hashes depend on it."""
OF_BLOCKS = "blocks:"


def hash_of_blocks(digests: Iterable[str]) -> str:
    """The content hash of a file with these block digests, in order."""
    return OF_BLOCKS + hashlib.sha256(b"".join(map(bytes.fromhex, digests))).hexdigest()


def content_hash(path: str, like: str = "") -> str:
    """The content hash of a file, or of an object by its URL, in the form of the hash `like`; by default the sha256."""
    with open_input(path) as file:
        if not like.startswith(OF_BLOCKS):
            return hashlib.file_digest(file, "sha256").hexdigest()
        blocks = iter(lambda: file.read(BLOCK_BYTES), b"")
        return hash_of_blocks(hashlib.sha256(block).hexdigest() for block in blocks)
