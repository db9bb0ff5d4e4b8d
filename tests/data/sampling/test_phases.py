"""Running text over phases: what a change of the length leaves, what is read anew, and what a plan consumes."""

import json

import numpy as np
import pytest

from drover.pipeline.config.training import TrainConfig, tokens_text
from drover.pipeline.config.tree import Config
from drover.pipeline.core.errors import UserError
from drover.pipeline.data.exclusion import Excluded
from drover.pipeline.data.sampling.consumption import excesses, many_epochs, plan_lines, planned, train_tokens
from drover.pipeline.data.sampling.order import PART, Order, Pool
from tests.data.planning.staged_corpora import settings
from tests.refusal import refused, table
from tests.token_shards import plan_of

NAMES = ("web", "code", "books")


def order_of(phases, *tokens, **train):
    return Order([Pool(name, count) for name, count in zip(NAMES, tokens, strict=False)],
                 plan_of(phases, **train), 3, "content")


@pytest.mark.parametrize(("between", "last", "left"), table("""
    {"mixture": {"web": 0, "code": 1}} -> {"sequence_length": 16} -> null
    {"mixture": {"web": 0, "code": 1}} -> {"sequence_length": 64} -> 2
    {"sequence_length": 24} -> {"sequence_length": 16} -> null
    {"sequence_length": 64} -> {"sequence_length": 16} -> 1""", json.loads, json.loads, json.loads))
def test_a_window_is_left_where_no_later_phase_goes_on_with_it(between, last, left):
    """The source of a phase of short sequences, over one that does not use it, reads it anew or goes on with it, in one
    after that. At most a part of it is left, and told."""
    mixture = {"web": 1, "code": 0}
    order = order_of([
        {"until": 1600, "sequence_length": 16, "batch_tokens": 160, "mixture": mixture},
        {"until": 3520, "sequence_length": 64, "batch_tokens": 960, "mixture": mixture, **between},
        {"until": 6400, "sequence_length": 64, "batch_tokens": 960, "mixture": mixture, **last}], 50_001, 50_001,
        grain_tokens=64)
    over = order.left_at()
    assert [0 < phase["web"] <= 50_001 // PART + 64 for phase in over] == [number == left for number in range(3)]
    assert not any(phase["code"] for phase in over)
    assert left is None or over[left]["web"] == 50_001 // 64 // PART * 64 - 1600


def test_faults_name_the_thing():
    phases = [{"until": 640, "mixture": {"web": 1, "code": 0}}, {"until": 1280, "mixture": {"web": 1, "code": 1}}]
    refused(UserError, r"train.phases\[1\] takes sequences from code \(16\): so few", order_of, phases, 1000, 16)
    order_of(phases, 1000, 17)
    refused(UserError, r"train takes sequences from code \(16\): so few training tokens do not fill one of 16",
            order_of, [], 1000, 16, mixture={"web": 1, "code": 1})
    refused(UserError, r"train.phases\[0\] takes sequences from code \(12\): .* one of 16", order_of,
            [{"until": 640, "sequence_length": 8}, {"until": 1280}], 1000, 12)
    refused(UserError, r"train\.mixture gives the source code 1e-07", order_of,
            [{"until": 640, "mixture": {"web": 1e7, "code": 1}}], 1000, 1000)
    refused(UserError, r"code 1e-09 of .* Without a mixture, sources have shares by their tokens", order_of,
            [{"until": 640}], 10**12, 1000)


def test_used_samples_keep_their_places_while_phases_are_laid_out_again(monkeypatch):
    """A rollback lays them out anew while threads beside the loader ask where samples come from."""
    order, used = order_of([{"until": 640}, {"until": 1280, "sequence_length": 32}], 900, 500, 400), np.arange(40)
    before, seen, continued = order.locate(used), [], order.space.continued

    def wanted(*given):
        seen.append(order.locate(used))
        return continued(*given)
    monkeypatch.setattr(order.space, "continued", wanted)
    order.leave_out(Excluded(((44, 48),)))
    assert len(seen) == 3 and all(np.array_equal(result, before) for result in [*seen, order.locate(used)])


def config_of(**train):
    return Config(shard=settings(NAMES), train=TrainConfig.model_validate(
        {"sequence_length": 16, "batch_tokens": 160, **train}))


COUNTS = {"splits": {"train": {"web": {"tokens": 40_001}, "code": {"tokens": 4001}, "books": {"tokens": 801}}}}


def plan_for(config):
    return planned(config, train_tokens(config, COUNTS))


def test_limits_and_printed_lines():
    """Limits of a plan in phases, test_packed_phases.py has and tests/launch/test_phases.py."""
    freely = config_of(phases=[{"until": 6400}, {"until": 14_400, "mixture": {"web": 1, "code": 1, "books": 1}},
                               {"until": 20_000, "mixture": {"web": 0, "code": 0, "books": 1}}])
    logged = plan_lines(freely.train, plan_for(freely))
    assert {"phase 3: steps 91 to 125, 5.6k tokens, 10 sequences of 16 a step",
            "  books: 5.6k tokens (100%) of 801, 6.99 epochs, 9.85 so far"} < {*logged}
    assert many_epochs(freely.train, plan_for(freely)) == {"books": pytest.approx(9.85, abs=0.01)}
    together = config_of(steps=300, max_epochs={"books": 1})
    assert "allows 1 of books, and the plan takes 1.07 (48k of 44.8k tokens of all sources)" in excesses(
        together.train, plan_for(together))[0]
    other = config_of(steps=3000, mixture={"web": 3, "code": 1, "books": 1}, max_epochs={"code": 30})
    assert many_epochs(other.train, plan_for(other)).keys() == {"web", "books"}, "code has a limit of its own"
    shorter = config_of(phases=[{"until": 1600, "mixture": {"web": 1, "code": 0, "books": 0}},
                                {"until": 3200, "sequence_length": 32}])
    over = tokens_text(plan_for(shorter).left[1]["web"])
    assert (f"  the epoch has {over} tokens of web left where the length changes: they are left to the next epoch"
            in plan_lines(shorter.train, plan_for(shorter)))
