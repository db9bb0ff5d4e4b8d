"""Messages in the store in which ranks meet, signed: whoever reaches its port can write there.

Whoever starts ranks gives all of them one secret, a new one for each start. Without it the signatures prove nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import os

SECRET = "DROVER_STORE_SECRET"
"""The variable of the environment that has it."""


class MessageError(Exception):
    """A message is nothing that a rank of this start told another one."""


def sign(key: str, content: bytes) -> bytes:
    """What is to be put under this key, which no other message of the start may have."""
    return _signature(key, content) + content


def verified(key: str, message: bytes) -> bytes:
    """The content of what was found under a key; MessageError where it was not put there by `sign`."""
    signature, content = message[:hashlib.sha256().digest_size], message[hashlib.sha256().digest_size:]
    if not hmac.compare_digest(signature, _signature(key, content)):
        raise MessageError(f"The message {key} in the ranks' store is refused: its signature is wrong. Either a rank "
                           f"has another {SECRET}, which must be the same on all of them, or somebody else has written "
                           f"into the store.")
    return content


def _signature(key: str, content: bytes) -> bytes:
    # A store of torchrun's agent outlives the ranks that it starts again: each attempt signs for itself.
    name = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{key}".encode()
    return hmac.digest(os.fsencode(os.environ.get(SECRET, "")), len(name).to_bytes(4) + name + content, "sha256")
