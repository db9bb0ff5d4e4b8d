"""Ports for ranks to meet on."""

from __future__ import annotations

import random
import socket

from pipeline.errors import UserError

PORTS = range(20000, 30000)
"""Below the ports that the kernel hands out by itself (32768 and up)."""
_held: list[socket.socket] = []


def free_port() -> int:
    """A port that nobody listens on here, on the first node; another one for each start.

    It is held until the next is asked for, bound without listening: the ranks listen some seconds later only, and
    others may look for a port meanwhile.
    """
    while _held:
        _held.pop().close()
    for port in random.SystemRandom().sample(PORTS, 100):
        probe = socket.socket()
        _held.append(probe)
        try:
            probe.bind(("", port))
        except OSError:
            continue
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the rank does: it may bind beside this
        return port
    raise UserError(f"This node has no free port among {PORTS.start}-{PORTS.stop - 1} for the ranks to meet on.")
