"""What is told of a run before it starts, and what is counted for that."""

import pytest

from drover.launch.describe import stages_text
from drover.launch.forecast import kept_checkpoints
from drover.pipeline.config.loading import load_config
from tests.conftest import REPOSITORY


@pytest.mark.parametrize("overrides, most", [
    ([], 3), (["train.checkpoint.permanent_every=25"], 7), (["train.checkpoint.copy_to=s3://b/p"], 5),
    (["launch.evaluate.every_checkpoints=2"], 8)])
def test_the_most_checkpoints_that_there_are_at_one_time(overrides, most):
    given = ["train.steps=100", "train.warmup_steps=1", "train.checkpoint={keep: 2, every_steps: 10}", *overrides]
    assert kept_checkpoints(load_config(REPOSITORY / "configs/demo.yaml", given, check=False)) == most


def test_the_plan_shows_how_layers_are_cut():
    config = load_config(REPOSITORY / "configs/llama3_405b.yaml", ["parallel.pp_schedule=1f1b"])
    assert stages_text(config) == ("16 ranks, 16 stages: 7 layers and the embedding in the first, 8 in those between, "
                                   "7 and the output matrix in the last")
