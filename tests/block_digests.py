"""The hashes of a file's blocks, as parts of it have them."""

from __future__ import annotations

import hashlib
from pathlib import Path

from drover.pipeline.contract import content_hash


def block_digests(path: Path, start: int, stop: int) -> list[str]:
    """Hex sha256 of each block that begins in the bytes [start, stop) of a file, in order.

    Over ranges that cover a file without overlap, each block is in one of the lists.
    """
    found, at = [], -(-start // content_hash.BLOCK_BYTES) * content_hash.BLOCK_BYTES
    with open(path, "rb", buffering=0) as file:
        while at < stop:
            file.seek(at)
            if not (block := file.read(content_hash.BLOCK_BYTES)):
                break
            while len(block) < content_hash.BLOCK_BYTES and (more := file.read(content_hash.BLOCK_BYTES - len(block))):
                block += more
            found.append(hashlib.sha256(block).hexdigest())
            at += content_hash.BLOCK_BYTES
    return found
