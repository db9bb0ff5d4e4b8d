"""Where rank 0 listens for the others, which variables make a process a rank, and what ranks say while they wait."""

import socket
import sys
from contextlib import suppress
from datetime import timedelta
from ipaddress import ip_address

import psutil
import pytest

from drover.launch.processes import free_port, run_here
from drover.pipeline.contract import telling
from drover.pipeline.contract.telling import Channel, await_ranks
from tests.conftest import environment, run_python
from tests.refusal import table

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


@pytest.mark.parametrize("variables, words", table("""
    RANK=0 WORLD_SIZE=2 -> RANK=0 and WORLD_SIZE=2, but no MASTER_ADDR and MASTER_PORT
    RANK=0 WORLD_SIZE=2 MASTER_ADDR=here MASTER_PORT=x -> no MASTER_ADDR and MASTER_PORT
    RANK=3 -> RANK=3 without WORLD_SIZE
    RANK=2 WORLD_SIZE=2 MASTER_ADDR=here MASTER_PORT=1 -> RANK=2 and WORLD_SIZE=2, which is no rank
    RANK= WORLD_SIZE=1 -> which is no rank"""))
def test_variables_that_are_no_ranks_are_named(variables, words):
    """They are left over in a shell."""
    ended = run_python("-m", "drover.pipeline.train", "--config", "nowhere.yaml", check=False,
                       **dict(word.split("=") for word in variables.split()))
    assert ended.returncode == 2 and words in ended.stderr, ended.stderr
    assert "`unset RANK WORLD_SIZE MASTER_ADDR MASTER_PORT`" in ended.stderr


@pytest.mark.parametrize("launched", [True, False])
@pytest.mark.parametrize("rank, address, words", [
    (0, "127.0.0.1", "rank 0 waits for 2 of 3 ranks at 127.0.0.1:"),
    (1, "127.0.0.1", "rank 1 of 3 waits for the store of rank 0 at 127.0.0.1:"),
    (0, "nosuch.invalid", "rank 0 of 3 waits for its own address at nosuch.invalid:"),
    (2, "nosuch.invalid", "rank 2 of 3 waits for the store of rank 0 at nosuch.invalid:")])
def test_a_rank_says_whom_it_waits_for(monkeypatch, capsys, rank, address, words, launched):
    """Once, and after a while."""
    monkeypatch.setattr(telling, "SAID_S", -1.0)
    monkeypatch.setattr(telling, "SAID_LAUNCHED_S", -1.0)
    monkeypatch.setattr(telling, "LATER_LOOKS_S", 0.0)
    monkeypatch.setattr(telling, "CONNECT", timedelta(seconds=2))
    monkeypatch.delenv("DROVER_CHAIN", raising=False)
    for name, value in {"RANK": rank, "WORLD_SIZE": 3, "MASTER_ADDR": address, "MASTER_PORT": free_port()}.items():
        monkeypatch.setenv(name, str(value))
    if launched:
        monkeypatch.setenv("DROVER_LAUNCHED", "1")
    with suppress(RuntimeError):  # torch gives up as well
        await_ranks(Channel.here().connected(), rank, 3, timedelta(seconds=0.2))
    said = capsys.readouterr().out
    assert said.count(words) == 1 and said.count("left over in this shell") == (not launched), said
