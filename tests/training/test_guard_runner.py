"""What ranks other than the first are spared, although all of them judge every step alike."""

from __future__ import annotations

import math

import pytest

from drover.pipeline.config.guarding import GuardConfig
from drover.pipeline.core.errors import UserError
from drover.pipeline.data.exclusion import Excluded
from drover.pipeline.data.provenance import SeenDocument
from drover.pipeline.records.checkpoints import TrainingProgress
from drover.pipeline.training.engines.engine import StepResult
from drover.pipeline.training.guard_runner import GuardRunner
from drover.pipeline.training.guards import Guards

RANKS = 3


class OneAfterAnother:
    """Ranks each of which runs to its end before the next begins: what rank 0 said is kept for the others."""

    def __init__(self, rank, said):
        self.rank, self.leads, self.said, self.heard = rank, rank == 0, said, iter(said)

    def same(self, value):
        """Rank 0's value, on every rank."""
        if self.leads:
            self.said.append(value)
        return next(self.heard)


@pytest.fixture
def reads(monkeypatch):
    """The ranks that read documents, one entry a time."""
    found: list[int] = []

    def read(data, ranges):
        found.append(data)  # which rank's it is
        return [SeenDocument("web", "train-0.arrow", 5, "abc", (first,)) for first, _ in ranges]
    monkeypatch.setattr("drover.pipeline.training.guard_runner.documents_of", read)
    return found


def on_all_ranks(results, **guards):
    """Judge `results` (loss, norm) one after another on every rank; what each said and logged, and how they ended."""
    shared, told, ends = [], [[] for _ in range(RANKS)], []
    for rank, said in enumerate(told):
        supervision = GuardRunner.__new__(GuardRunner)
        supervision.ranks, supervision.data, supervision.say = OneAfterAnother(rank, shared), rank, said.append
        supervision.excluded, supervision.batch_sequences = Excluded(), 8
        Guards.__init__(supervision, GuardConfig(**guards))
        try:
            for step, (loss, norm) in enumerate(results):
                result = StepResult(loss, norm, supervision.limits().allow(loss, norm))
                supervision.judge_step(step + 1, result, TrainingProgress(step=step, samples=8 * step), True,
                                  lambda event, said=said, **details: said.append((event, details["documents"])))
        except UserError as error:
            ends.append(str(error))
    return told, ends


QUIET = [(3.0, 1.0)] * 33
NAN, SPIKE = (math.nan, 1.0), (9.0, 1.0)


@pytest.mark.parametrize(("results", "guards", "events", "stops"), [
    ([NAN], {}, ["skip"], False), ([*QUIET, SPIKE], {"spike": "rollback"}, ["rollback"], False),
    ([*QUIET, SPIKE, SPIKE], {"spike": "skip", "max_skipped": 1}, ["skip"], True),
    ([*QUIET, SPIKE], {"spike": "rollback", "max_rollbacks": 0}, [], True)])
def test_one_rank_reads_documents_and_tells_and_all_stop_with_the_same_words(reads, results, guards, events, stops):
    told, ends = on_all_ranks(results, **guards)
    assert reads == [0] * (len(events) + stops) and told[1] == told[2] == []
    for event, text, (kind, documents) in zip(events, told[0][::2], told[0][1::2], strict=True):
        assert "web/abc (train-0.arrow, document 5)" in text and event == kind
        assert documents[0]["samples"] == [8 * (len(results) - stops) - 8]
    assert len(ends) == RANKS * stops and len(set(ends)) == stops
    assert all("web/abc" in said for said in ends)
