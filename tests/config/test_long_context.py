"""Sequences of 131,072 tokens are a configuration: what is planned for it, without a cluster."""

import re
from types import SimpleNamespace

from drover.launch.describe import training_facts
from drover.pipeline.config.loading import load_config
from tests.conftest import REPOSITORY

CONFIG = REPOSITORY / "configs/llama3_8b_128k.yaml"


def facts(*overrides, ranks=32):
    """What is printed before anything starts, by its first word."""
    lines = training_facts(load_config(CONFIG, ["model.vocab_size=128256", *overrides]), SimpleNamespace(ranks=ranks))
    return dict(re.split(r"\s+", line, maxsplit=1) for line in lines)


def test_the_plan_shows_what_each_rank_holds():
    assert facts(ranks=8)["memory"] == facts("parallel.cp=1", ranks=8)["memory"], "weights are shared either way"
    assert facts(ranks=8)["memory"].startswith("32.1 GB a rank for weights, gradients and optimizer state")
    assert facts("parallel.reshard=always", ranks=8)["memory"].startswith("16.1 GB a rank")
