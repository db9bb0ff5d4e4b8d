"""What identifies a file's content: its sha256, or, of a file that several units read a part of each, a hash of its
blocks' hashes, which they make side by side while they read.

Which of the two a file has is written in the hash itself, so both can be compared with the file as it is later.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from drover.pipeline.storage.object_files import open_input

BLOCK_BYTES = 1 << 23
"""Size of a block; fixed, since recorded hashes depend on it."""
OF_BLOCKS = "blocks:"


def hash_of_blocks(digests: Iterable[str]) -> str:
    """The content hash of a file with these block digests, in order."""
    return OF_BLOCKS + hashlib.sha256(b"".join(map(bytes.fromhex, digests))).hexdigest()


def content_hash(path: Path | str, like: str = "") -> str:
    """The content hash of a file, or of an object by its URL, in the form that the hash `like` has; its sha256 where
    there is none to compare with."""
    with open_input(str(path)) as file:
        if not like.startswith(OF_BLOCKS):
            return hashlib.file_digest(file, "sha256").hexdigest()
        blocks = iter(lambda: file.read(BLOCK_BYTES), b"")
        return hash_of_blocks(hashlib.sha256(block).hexdigest() for block in blocks)
