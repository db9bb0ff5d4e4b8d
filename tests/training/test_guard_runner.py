"""What ranks other than the first are spared, although all of them judge every step alike."""

from __future__ import annotations

import math
import threading

import pytest

from pipeline.config.guarding import GuardConfig
from pipeline.data.exclusion import Excluded
from pipeline.data.provenance import SeenDocument
from pipeline.errors import UserError
from pipeline.records.checkpoints import TrainingProgress
from pipeline.training.engines.engine import StepResult
from pipeline.training.guard_runner import GuardRunner
from pipeline.training.guards import Guards

RANKS = 3


class ThreadRanks:
    """Ranks that are threads of this process, as far as guards need them."""

    def __init__(self, rank: int, box: list, barrier: threading.Barrier) -> None:
        self.rank, self.leads, self.box, self.barrier = rank, rank == 0, box, barrier

    def same(self, value):
        """Rank 0's value, on every rank; each must come."""
        if self.leads:
            self.box[:] = [value]
        self.barrier.wait(60)
        found = self.box[0]
        self.barrier.wait(60)
        return found


@pytest.fixture
def reads(monkeypatch):
    """The ranks that read documents, one entry a time."""
    found: list[int] = []

    def read(data, ranges):
        found.append(data)  # which rank's it is
        return [SeenDocument("web", "train-0.arrow", 5, "abc", (first,)) for first, _ in ranges]
    monkeypatch.setattr("pipeline.training.guard_runner.documents_of", read)
    return found


def on_all_ranks(results, **guards):
    """Judge `results` (loss, norm) one after another on every rank; what was said and logged, and how each ended."""
    box, barrier, told, ends = [], threading.Barrier(RANKS), {}, {}

    def run(rank):
        supervision = GuardRunner.__new__(GuardRunner)
        supervision.ranks, supervision.data = ThreadRanks(rank, box, barrier), rank
        supervision.excluded, supervision.batch_sequences = Excluded(), 8
        said = told[rank] = []
        supervision.say = lambda text: said.append(text)
        config = GuardConfig(**guards)
        supervision.guards = Guards(config, describe=supervision._described)
        try:
            for step, (loss, norm) in enumerate(results, 1):
                limits = supervision.guards.limits()
                result = StepResult(loss, norm, limits.allow(loss, norm))
                supervision.judge(step, result, TrainingProgress(step=step - 1, samples=8 * (step - 1)), True,
                                  lambda event, said=said, **details: said.append((event, details["documents"])))
        except UserError as error:
            ends[rank] = str(error)
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    return told, ends


QUIET = [(3.0, 1.0)] * 33
NAN, SPIKE = (math.nan, 1.0), (9.0, 1.0)


@pytest.mark.parametrize(("results", "guards", "events", "stops"), [
    ([NAN], {}, ["skip"], False), ([*QUIET, SPIKE], {}, ["spike"], False),
    ([*QUIET, SPIKE], {"spike": "rollback"}, ["rollback"], False), ([NAN], {"max_skipped": 0}, [], True),
    ([*QUIET, SPIKE, SPIKE], {"spike": "skip", "max_skipped": 1}, ["skip"], True),
    ([*QUIET, SPIKE], {"spike": "rollback", "max_rollbacks": 0}, [], True)])
def test_one_rank_reads_documents_and_tells_and_all_stop_with_the_same_words(reads, results, guards, events, stops):
    told, ends = on_all_ranks(results, **guards)
    assert reads == [0] * (len(events) + stops) and told[1] == told[2] == []
    for event, text, (kind, documents) in zip(events, told[0][::2], told[0][1::2], strict=True):
        assert "web/abc (train-0.arrow, document 5)" in text and event == kind
        assert documents[0]["samples"] == [8 * (len(results) - stops) - 8]
    assert len(ends) == RANKS * stops and len(set(ends.values())) == stops
    assert all("web/abc" in said for said in ends.values())
