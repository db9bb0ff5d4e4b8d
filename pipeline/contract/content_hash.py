"""What identifies a file's content: its sha256, or, of a file that several units read a part of each, a hash of its
blocks' hashes, which they make side by side while they read.

Which of the two a file has is written in the hash itself, so both can be compared with the file as it is later.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from pipeline.files import sha256_file

BLOCK_BYTES = 1 << 23
"""Size of a block; fixed, since recorded hashes depend on it."""
OF_BLOCKS = "blocks:"


def block_digests(path: Path, start: int, stop: int) -> list[str]:
    """Hex sha256 of each block that begins in the bytes [start, stop) of a file, in order.

    Over ranges that cover a file without overlap, each block is in one of the lists.
    """
    found, at = [], -(-start // BLOCK_BYTES) * BLOCK_BYTES
    with open(path, "rb", buffering=0) as file:
        while at < stop:
            file.seek(at)
            if not (block := file.read(BLOCK_BYTES)):
                break
            while len(block) < BLOCK_BYTES and (more := file.read(BLOCK_BYTES - len(block))):
                block += more
            found.append(hashlib.sha256(block).hexdigest())
            at += BLOCK_BYTES
    return found


def hash_of_blocks(digests: Iterable[str]) -> str:
    """The content hash of a file with these block digests, in order."""
    return OF_BLOCKS + hashlib.sha256(b"".join(map(bytes.fromhex, digests))).hexdigest()


def content_hash(path: Path, like: str = "") -> str:
    """The file's content hash in the form that the hash `like` has; its sha256 where there is none to compare with."""
    if like.startswith(OF_BLOCKS):
        return hash_of_blocks(block_digests(path, 0, path.stat().st_size))
    return sha256_file(path)
