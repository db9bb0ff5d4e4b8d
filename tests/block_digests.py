"""The hashes of a file's blocks, as parts of it have them."""

import hashlib

from drover.pipeline.contract import content_hash


def block_digests(path, start, stop):
    """Hex sha256 of each block that begins in the bytes [start, stop) of a file, in order.

    Over ranges that cover a file without overlap, each block is in one of the lists.
    """
    size, content = content_hash.BLOCK_BYTES, path.read_bytes()
    begins = range(-(-start // size) * size, min(stop, len(content)), size)
    return [hashlib.sha256(content[at:at + size]).hexdigest() for at in begins]
