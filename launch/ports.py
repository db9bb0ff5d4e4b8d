"""Ports for ranks to meet on."""

from __future__ import annotations

import socket

from pipeline.errors import UserError

PORTS = range(20000, 30000)
"""Below the ports that the kernel hands out by itself (32768 and up)."""
_held: list[socket.socket] = []


def free_port(job: int, number: int) -> int:
    """A port for start `number` of a job, which nobody listens on here, on the first node.

    Jobs beside each other on a node, and starts of one job, get different ones. It is held until the next is asked for,
    bound without listening: the ranks listen some seconds later only, and others may look for a port meanwhile.
    """
    while _held:
        _held.pop().close()
    for attempt in range(100):
        port = PORTS[(job * 37 + number + attempt * 1009) % len(PORTS)]
        probe = socket.socket()
        try:
            probe.bind(("", port))
        except OSError:
            probe.close()
            continue
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the rank does: it may bind beside this
        _held.append(probe)
        return port
    raise UserError(f"This node has no free port among {PORTS.start}-{PORTS.stop - 1} for the ranks to meet on.")
