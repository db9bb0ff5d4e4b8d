"""Signatures of messages in the store in which ranks meet. They are needed because anybody who reaches the store's port
can write there.

The launcher gives all ranks of a start one new secret. Without a secret the signatures prove nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import os

SECRET = "DROVER_STORE_SECRET"
"""The environment variable that contains the secret."""


class MessageError(Exception):
    """No rank of this start has sent this message."""


def sign(key: str, content: bytes) -> bytes:
    """The signed message to store under this key. No other message of the start may have the same key."""
    return _signature(key, content) + content


def verified(key: str, message: bytes) -> bytes:
    """The content of the message found under a key; MessageError if it was not made by `sign`."""
    signature, content = message[:hashlib.sha256().digest_size], message[hashlib.sha256().digest_size:]
    if not hmac.compare_digest(signature, _signature(key, content)):
        raise MessageError(f"The message {key} in the ranks' store is refused: its signature is wrong. Either a rank "
                           f"has another {SECRET}, which must be equal on all ranks, or another program has written "
                           f"into the store.")
    return content


def _signature(key: str, content: bytes) -> bytes:
    # The store of torchrun's agent stays when the agent restarts its ranks, so the signature contains the attempt.
    name = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{key}".encode()
    return hmac.digest(os.fsencode(os.environ.get(SECRET, "")), len(name).to_bytes(4) + name + content, "sha256")
