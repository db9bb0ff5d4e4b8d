"""Where rank 0 listens for the others: on one machine, where no other machine can reach it."""

import socket
import sys
from ipaddress import ip_address

import psutil
import pytest

from drover.launch.processes import free_port, run_here
from drover.pipeline.contract.telling import Channel
from tests.conftest import environment

LISTENING = """
import os, psutil
from drover.pipeline.contract.telling import Channel
from drover.pipeline.parallel.ranks import start_ranks, stop_ranks
channel = Channel.here()
if channel and channel.rank == 0:
    channel.end(0)
elif channel:
    channel.listen("train", list)
ranks = start_ranks(store=channel and channel.store)
found = [at.laddr.ip for at in psutil.Process().net_connections("inet") if at.status == psutil.CONN_LISTEN]
print("listens", os.environ["GLOO_SOCKET_IFNAME"], *found)
ranks.barrier()
stop_ranks()
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_on_this_machine_listen_on_loopback_only(tmp_path, ranks):
    log = tmp_path / "log"
    group = run_here([sys.executable, "-c", LISTENING], {**environment(), "CUDA_VISIBLE_DEVICES": ""}, ranks=ranks,
                     log=log)
    said = [line.split()[1:] for line in log.read_text().splitlines() if line.startswith("listens")]
    assert group.status == 0 and len(said) == ranks, log.read_text()
    assert {interface for interface, *_ in said} == {"lo"}, "gloo alone would take the network of the host's name"
    found = [ip_address(place) for _, *places in said for place in places]
    assert len(found) >= ranks and all(place.is_loopback for place in found), found


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.1.1", "localhost", "::1", socket.gethostname()])
def test_the_store_of_ranks_that_meet_at_an_address(monkeypatch, address):
    """A host's own name, even where this machine takes it for 127.0.1.1, is for ranks of other machines too."""
    if address == "::1" and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    port = free_port()
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": address, "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    channel = Channel()
    channel._connect()
    places = [at.laddr.ip for at in psutil.Process().net_connections("inet")
              if at.status == psutil.CONN_LISTEN and at.laddr.port == port]
    assert len(places) == 1 and ip_address(places[0]).is_loopback == (address != socket.gethostname()), places
