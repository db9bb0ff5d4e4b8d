"""What is told of large runs before they start."""

from types import SimpleNamespace

from drover.launch.describe import stages_text, training_facts
from drover.pipeline.config.loading import load_config
from tests.conftest import REPOSITORY


def test_the_plan_shows_how_layers_are_cut():
    config = load_config(REPOSITORY / "configs/llama3_405b.yaml", ["parallel.pp_schedule=1f1b"])
    assert stages_text(config) == ("16 ranks, 16 stages: 7 layers and the embedding in the first, 8 in those between, "
                                   "7 and the output matrix in the last")
    facts = training_facts(load_config(REPOSITORY / "configs/demo.yaml", ["parallel.pp=2"]), SimpleNamespace(ranks=2))
    assert [line.partition(": ")[2] for line in facts if line.startswith("pipeline  ")] == [
        "2 layers and the embedding in the first, 2 and the output matrix in the last"]
