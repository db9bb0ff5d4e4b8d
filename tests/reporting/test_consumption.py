"""What was planned stands beside what was trained on, by phase and source."""

import pytest

from drover.pipeline.config.data import FilesSource, ShardConfig
from drover.pipeline.config.training import TrainConfig
from drover.pipeline.config.tree import Config
from drover.pipeline.contract.manifest import Manifest
from drover.pipeline.data.sampling.consumption import planned, train_tokens
from drover.pipeline.reporting.chapters.consumption import consumption
from drover.pipeline.reporting.facts import Facts

ENCODED = {"splits": {"train": {"web": {"tokens": 40_001}, "code": {"tokens": 4001}}}}
PHASES = [{"until": 6400, "mixture": {"web": 1, "code": 0}},
          {"until": 12_800, "sequence_length": 32, "batch_tokens": 320}]


def facts(counts, **train):
    config = Config(shard=ShardConfig(sources=[FilesSource(kind="files", name=name, paths=["x"])
                                               for name in ("web", "code")]),
                    train=TrainConfig.model_validate({"sequence_length": 16, "batch_tokens": 160, **train}))
    return Facts(config, {name: Manifest(name, {}, [], made, {}) for name, made in
                              (("train", counts), ("encode", ENCODED))})


def test_phases_are_shown_with_what_was_left_out():
    counts = {"phases": [{"steps": 40, "tokens": {"web": 6400, "code": 0}, "left_out": {"web": 160, "code": 0}},
                         {"steps": 20, "tokens": {"web": 5760, "code": 640}, "left_out": {"web": 0, "code": 0}}]}
    found = facts(counts, phases=PHASES)
    table = consumption(found)
    rows = [row for _, row in table.rows]
    plan = planned(found.config, train_tokens(found.config, ENCODED))
    assert rows[0] == ["1", "web", "40", "6,400", "6,400", "160", "0.160", "0.160"]
    assert rows[1][:2] == ["2", "web"] and rows[2][:2] == ["2", "code"]
    assert rows[2][3:6] == [f"{plan.phases[1]['code']:,}", "640", "0"]
    assert rows[3] == ["all", "web", "–", f"{plan.tokens('web'):,}", "12,160", "160",
                       f"{plan.tokens('web') / 40_001:.3f}", "0.304"]
    assert len(rows) == 5 and "where the sequence length changes" in table.note


def test_a_mixture_without_phases_is_shown_too_and_nothing_else():
    counts = {"phases": [{"steps": 50, "tokens": {"web": 7200, "code": 800}, "left_out": {"web": 160, "code": 0}}]}
    rows = [row for _, row in consumption(facts(counts, steps=50, mixture={"web": 9.0, "code": 1.0})).rows]
    assert [row[4:6] for row in rows] == [["7,200", "160"], ["800", "0"]] * 2
    assert float(rows[0][6]) == pytest.approx(0.18, abs=0.01)
    assert not consumption(facts(counts, steps=50))
