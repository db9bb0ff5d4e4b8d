"""Packed documents over phases: what is left where the length changes is packed anew and told, once and by all ranks
alike."""

import re

import numpy as np
import pytest

from drover.pipeline.config.training import TrainConfig
from drover.pipeline.core.errors import UserError
from drover.pipeline.data.exclusion import Excluded
from drover.pipeline.data.sampling.consumption import planned_by
from drover.pipeline.training.data import refuse_beyond
from drover.tools.audit import Audit, _sequences
from tests.data.sampling.phased import contents, times_read
from tests.refusal import refused
from tests.token_shards import SOURCES, plan_of, training_data, write_numbered

SOME = [[30, 5, 9, 70, 3, 12, 31], [7, 40, 8, 8, 50, 60], [3, 100, 21, 300], [20, 20, 1]]
"""Documents of two shards of each source."""
RAMP = [{"until": 160, "batch_tokens": 32}, {"until": 400, "sequence_length": 40, "batch_tokens": 80},
        {"until": 560, "sequence_length": 16, "batch_tokens": 32}]


def packed(folder, **options):
    return training_data(folder, write_numbered(folder, SOME), packed=True, plan=plan_of(RAMP, packing="best_fit"),
                         **options)


def test_what_is_left_where_the_length_changes_is_counted_to_the_token(tmp_path):
    data, logged = packed(tmp_path), []
    order = data.order
    read = {pool: sum(int(tokens.sum()) for tokens in shards.values())
            for (pool, _), shards in times_read(data, np.arange(10)).items()}
    first, second, third = order.left_at()
    assert first == dict.fromkeys(SOURCES, 0) and all(third.values())
    assert second == {name: order.pools[pool].tokens - read[pool] for pool, name in enumerate(SOURCES)}
    padding = sum(data.batch_of(np.arange(10)).padding)
    assert abs(planned_by(order).padding[0] - padding) < 40, "by the mean of the sequences"
    epochs = order.epochs(order.end)
    assert sum(epochs[pool.name] * pool.tokens for pool in order.pools) == pytest.approx(
        560 - sum(phase.padding for phase in order.taken(order.end)))

    refused(UserError, rf"allows 0.1 of code, and the plan takes {epochs['code']:.2f} ", refuse_beyond, TrainConfig(
        packing="best_fit", phases=RAMP, sequence_length=16, batch_tokens=64, max_epochs={"code": 0.1}), data,
        logged.append)
    assert sum(text.startswith("  padding: ") for text in logged) == 3
    assert re.search(r"  the epoch has \d+ tokens of web left where the length changes: they come first, packed again",
                     "\n".join(logged))


def test_a_rollback_has_only_what_comes_after_planned_again_and_so_does_damage(tmp_path):
    logged, again = [], []
    data = packed(tmp_path, said=logged)
    data.leave_out(Excluded())
    assert len(logged) == 6 and logged[0].startswith("planned the best-fit packing of 4 of 4 token shards")
    assert "in sequences of 40, of what an epoch has left" in logged[2] and "of 2 of 2 token shards" in logged[2]
    files, rest = contents(tmp_path / "packing"), data.packings[2]
    path = next(rest.path(row) for row in range(4) if rest.path(row).exists())
    path.write_bytes(path.read_bytes()[:-9])
    packed(tmp_path, said=again).leave_out(Excluded())
    assert len(again) == 1 and "of 1 of 2 token shards" in again[0] and contents(tmp_path / "packing") == files
    data.leave_out(Excluded([(8, 10)]))
    assert 6 < (before := len(logged)) <= 10
    data.leave_out(Excluded([(8, 10), (13, 15)]))
    assert before < len(logged) <= before + 2, "the second change of length comes after it, the first before"
    del logged[:]
    data.leave_out(Excluded())
    assert logged == [], "what was planned is known"


def faults(data, *ranges):
    """What the audit says of the samples of these ranges."""
    result = Audit()
    _sequences(data, ranges, result)
    return result.faults


def test_the_audit_finds_a_sequence_and_a_token_that_came_twice(tmp_path):
    data = packed(tmp_path)
    end = data.order.end
    assert faults(data, (0, end)) == []
    [twice] = faults(data, (0, end), (3, 4))
    assert ", of 16 tokens, came 2 times in epoch 0" in twice
    # What was left where the length changed first is thought to be everything.
    data.spaces[2:4] = [data.spaces[1]] * 2
    wrong = faults(data, (0, end))
    assert wrong and all("came twice in epoch 0" in fault for fault in wrong)
