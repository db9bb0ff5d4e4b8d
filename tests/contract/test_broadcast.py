"""Where rank 0 listens for the others, which variables make a process a rank, and what ranks say while they wait."""

import socket
import sys
from contextlib import suppress
from datetime import timedelta
from ipaddress import ip_address
from unittest import mock

import psutil
import pytest
import torch

from drover.launch.processes import free_port, run_local
from drover.pipeline.contract import broadcast, entry
from drover.pipeline.contract.broadcast import Channel, await_ranks
from drover.pipeline.contract.entry import stage_main
from tests.conftest import environment
from tests.refusal import table

LISTENING = """
import os, psutil
from drover.pipeline.contract.broadcast import Channel
from drover.pipeline.parallel.ranks import start_ranks, stop_ranks
channel = Channel.of_process()
if channel and channel.rank == 0:
    channel.end(0)
elif channel:
    channel.listen("train", list)
ranks = start_ranks(store=channel and channel.store)
found = [at.laddr.ip for at in psutil.Process().net_connections("inet") if at.status == psutil.CONN_LISTEN]
os.write(1, " ".join(["listens", os.environ["GLOO_SOCKET_IFNAME"], *found, "\\n"]).encode())  # one line, one write
ranks.barrier()
stop_ranks()
"""


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_ranks_on_this_machine_listen_on_loopback_only(tmp_path, ranks):
    log = tmp_path / "log"
    group = run_local([sys.executable, "-c", LISTENING], {**environment(), "CUDA_VISIBLE_DEVICES": ""}, ranks=ranks,
                      log=log)
    printed = [line.split()[1:] for line in log.read_text().splitlines() if line.startswith("listens")]
    assert group.status == 0 and len(printed) == ranks, log.read_text()
    assert {interface for interface, *_ in printed} == {"lo"}, "gloo alone would take the network of the host's name"
    result = [ip_address(place) for _, *places in printed for place in places]
    assert len(result) >= ranks and all(place.is_loopback for place in result), result


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.1.1", "localhost", "::1", socket.gethostname()])
def test_the_store_of_ranks_that_meet_at_an_address(monkeypatch, address):
    """A host's own name, even where this machine takes it for 127.0.1.1, is for ranks of other machines too."""
    if address == "::1" and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    port = free_port()
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": address, "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    channel = Channel()
    channel.connected()
    places = [at.laddr.ip for at in psutil.Process().net_connections("inet")
              if at.status == psutil.CONN_LISTEN and at.laddr.port == port]
    assert len(places) == 1 and ip_address(places[0]).is_loopback == (address != socket.gethostname()), places


@pytest.mark.parametrize("variables, words", table("""
    RANK=0 WORLD_SIZE=2 -> RANK=0 WORLD_SIZE=2 MASTER_ADDR= MASTER_PORT=, which is no rank
    RANK=3 -> RANK=3 WORLD_SIZE= MASTER_ADDR= MASTER_PORT=, which is no rank
    RANK=2 WORLD_SIZE=2 MASTER_ADDR=here MASTER_PORT=1 -> RANK=2 WORLD_SIZE=2 MASTER_ADDR=here MASTER_PORT=1, which"""))
def test_variables_that_are_no_ranks_are_named(monkeypatch, capsys, variables, words):
    """They are left over in a shell."""
    monkeypatch.setattr(entry, "SILENCE_S", 0.0)
    for name, value in (word.split("=") for word in variables.split()):
        monkeypatch.setenv(name, value)
    assert stage_main("train", lambda work: None, ["--config", "nowhere.yaml"]) == 2
    printed = capsys.readouterr().err
    assert words in printed and "`unset RANK WORLD_SIZE MASTER_ADDR MASTER_PORT`" in printed, printed


@pytest.mark.parametrize("rank, address, words", [
    (0, "127.0.0.1", "rank 0 waits for 2 of 3 ranks at 127.0.0.1:"),
    (1, "127.0.0.1", "rank 1 of 3 waits for the store of rank 0 at 127.0.0.1:"),
    (0, "nosuch.invalid", "rank 0 of 3 waits for its own address at nosuch.invalid:")])
def test_a_rank_says_whom_it_waits_for(monkeypatch, capsys, rank, address, words):
    """Once, and after a while."""
    if "2 of 3" not in words:
        monkeypatch.setattr(torch.distributed, "TCPStore", mock.Mock(side_effect=RuntimeError))
    if address == "nosuch.invalid":  # some machines look for it for seconds
        monkeypatch.setattr(socket, "getaddrinfo", mock.Mock(side_effect=socket.gaierror(-2, "not known")))
    monkeypatch.setattr(broadcast, "REPORT_AFTER_S", -1.0)
    monkeypatch.setattr(broadcast, "LATER_LOOKS_S", 0.0)
    monkeypatch.setattr(broadcast, "CONNECT", timedelta(seconds=0.5))
    for name, value in {"RANK": rank, "WORLD_SIZE": 3, "MASTER_ADDR": address, "MASTER_PORT": free_port()}.items():
        monkeypatch.setenv(name, str(value))
    with suppress(RuntimeError):
        await_ranks(Channel.of_process().connected(), rank, 3, timedelta(seconds=0.2))
    printed = capsys.readouterr().out
    assert printed.count(words) == printed.count("left over in this shell") == 1, printed
