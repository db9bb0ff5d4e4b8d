"""When garbage is collected, what requests to stop come to over all ranks, and which checkpoints wait for scores."""

import gc
import os
from signal import SIGINT, SIGTERM, SIGUSR1, SIGUSR2
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest

from drover.pipeline.contract.state import STOP
from drover.pipeline.core.files import write_json
from drover.pipeline.records.checkpoint_scores import CheckpointScores, digest_of, scores_path
from drover.pipeline.training.hooks import ALL_EVERY, EVERY, Garbage, Scores, Stop, StopAgreement


def test_garbage_goes_after_the_same_steps_on_all_ranks(monkeypatch):
    garbage = Garbage()
    try:
        garbage.on_start(None)
        assert not gc.isenabled() and gc.get_freeze_count() > 0
        monkeypatch.setattr(gc, "collect", collect := Mock())
        for step in range(1, ALL_EVERY + 1):
            garbage.after_step(SimpleNamespace(progress=SimpleNamespace(step=step)))
        assert collect.mock_calls == [*[call(1)] * (ALL_EVERY // EVERY - 1), call()]
    finally:
        garbage.on_end(None)
    assert gc.isenabled() and gc.get_freeze_count() == 0


def rank_of(rank=0, world=1):
    return SimpleNamespace(rank=rank, world=world, is_rank_zero=rank == 0)


def ask(folder, signals, world=4, minutes=None, began=0.0):
    """What all ranks agree on where `signals` gives those that each rank got; it must be the same on each."""
    requests = [StopAgreement(rank_of(rank, world), folder, minutes, began) for rank in range(world)]
    for rank, numbers in signals.items():
        with requests[rank]:
            for number in numbers:
                os.kill(os.getpid(), number)
    sums = [sum(votes) for votes in zip(*(request.votes() for request in requests), strict=True)]
    for request in requests:
        request.on_votes(None, sums)
    assert len({request.stop and request.stop.again for request in requests}) == 1
    return requests[0].stop


@pytest.mark.parametrize("signals, expected", [
    ({}, None),
    ({3: [SIGUSR1]}, Stop("SIGUSR1 on 1 of 4 ranks", True)),
    ({rank: [SIGINT] for rank in range(4)}, Stop("SIGINT", False)),
    ({0: [SIGUSR2], 3: [SIGTERM]}, Stop("SIGTERM on 1 of 4 ranks and SIGUSR2 on 1 of 4 ranks", False)),
])
def test_signals_of_all_ranks_come_to_one_decision(tmp_path, signals, expected):
    assert ask(tmp_path, signals) == expected


def test_the_file_and_the_clock(tmp_path):
    assert ask(tmp_path, {}, minutes=1e9) is None
    assert ask(tmp_path, {}, minutes=0.5, began=-60) == Stop("train.stop_after_minutes=0.5", True)
    assert ask(tmp_path, {}, minutes=30.0, began=-1e9) == Stop("train.stop_after_minutes=30", True)
    (tmp_path / STOP).parent.mkdir()
    (tmp_path / STOP).write_bytes(b" \n")
    assert ask(tmp_path, {}) == Stop("the file launch/stop", False)
    (tmp_path / STOP).write_bytes(b"enough \xff")
    assert ask(tmp_path, {2: [SIGUSR2]}, minutes=0.5, began=-60).again is False
    assert ask(tmp_path, {}).reason.startswith("enough")


def test_a_checkpoint_waits_for_scores_of_its_content_and_a_damaged_record_is_a_warning(tmp_path):
    marker, record = tmp_path / "checkpoints/step-00000004/COMPLETE.json", scores_path(tmp_path, 4)
    hook, loop = Scores(tmp_path, 4), Mock(ranks=rank_of())
    write_json(marker, {"files": 1})
    assert hook.needs(4) and not hook.needs(6)
    write_json(record, vars(CheckpointScores(4, digest_of(marker.parent), 9, 9.0, {}, {})))
    assert not hook.needs(4)
    write_json(marker, {"files": 2})
    assert hook.needs(4), "it was replaced"
    marker.unlink()
    assert not hook.needs(4), "it is being removed"
    record.write_text("{")
    hook.on_finish(loop)
    assert "step-00000004.json is damaged" in loop.say.mock_calls[0].args[0]
