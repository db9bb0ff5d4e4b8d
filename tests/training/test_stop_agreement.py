"""What requests to stop come to, over all ranks."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

import pytest

from drover.pipeline.contract.state import STOP
from drover.pipeline.training import stop_agreement
from drover.pipeline.training.stop_agreement import Stop, StopAgreement


@dataclass
class Rank:
    rank: int
    world: int

    @property
    def leads(self):
        return self.rank == 0


def agreed_by(request, sums):
    request.on_votes(None, sums)
    return request.stop


def ask(folder, signals, world=4, minutes=None, began=0.0):
    """What all ranks agree on where `signals` gives those that each rank got; it must be the same on each."""
    requests = [StopAgreement(Rank(rank, world), folder, minutes, began) for rank in range(world)]
    for rank, numbers in signals.items():
        with requests[rank]:
            for number in numbers:
                os.kill(os.getpid(), number)
    sums = [sum(votes) for votes in zip(*(request.votes() for request in requests), strict=True)]
    agreed = [agreed_by(request, sums) for request in requests]
    assert len({stop and stop.again for stop in agreed}) == 1
    return agreed[0]


@pytest.mark.parametrize("signals, expected", [
    ({}, None),
    ({3: [signal.SIGUSR1]}, Stop("SIGUSR1 on rank 3", True)),
    ({rank: [signal.SIGINT] for rank in range(4)}, Stop("SIGINT", False)),
    ({2: [signal.SIGUSR2, signal.SIGTERM]}, Stop("SIGTERM on rank 2 and SIGUSR2 on rank 2", False)),
    ({0: [signal.SIGUSR2], 3: [signal.SIGTERM]}, Stop("SIGTERM on 1 of 4 ranks and SIGUSR2 on 1 of 4 ranks", False)),
])
def test_signals_of_all_ranks_come_to_one_decision(tmp_path, signals, expected):
    assert ask(tmp_path, signals) == expected


def test_the_file_and_the_clock(tmp_path):
    assert ask(tmp_path, {}, minutes=1e9) is None
    assert ask(tmp_path, {}, minutes=0.5, began=-60) == Stop("train.stop_after_minutes=0.5", True)
    (tmp_path / STOP).parent.mkdir()
    (tmp_path / STOP).write_bytes(b" \n")
    assert ask(tmp_path, {}) == Stop("the file launch/stop", False)
    (tmp_path / STOP).write_bytes(b"enough \xff")
    assert ask(tmp_path, {2: [signal.SIGUSR2]}, minutes=0.5, began=-60).again is False
    assert ask(tmp_path, {}).reason.startswith("enough")


def test_the_file_is_looked_for_now_and_then_only(tmp_path, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(stop_agreement.time, "monotonic", lambda: clock[0])
    request = StopAgreement(Rank(0, 1), tmp_path, None, 0.0)
    assert agreed_by(request, request.votes()) is None
    (tmp_path / STOP).parent.mkdir()
    (tmp_path / STOP).touch()
    clock[0] += 1.5
    assert agreed_by(request, request.votes()) is None
    clock[0] += 1
    assert agreed_by(request, request.votes()) is not None
    (tmp_path / STOP).unlink()
    assert agreed_by(request, request.votes()) is not None, "who was asked once stays asked"


def test_the_process_is_left_as_it_was_found(tmp_path):
    before = signal.getsignal(signal.SIGUSR2), signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    try:
        signal.raise_signal(signal.SIGUSR2)  # waits; to this thread, since others of the test process may hear it
        with StopAgreement(Rank(0, 1), tmp_path, None, 0.0) as request:
            assert agreed_by(request, request.votes()) == Stop("SIGUSR2", True)
        assert signal.SIGUSR2 in signal.pthread_sigmask(signal.SIG_BLOCK, [])
        assert signal.getsignal(signal.SIGUSR2) == before[0]
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before[1])
