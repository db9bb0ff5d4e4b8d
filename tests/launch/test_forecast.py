"""What the plan says of a run before it starts: its disk, how many checkpoints it keeps, how its layers are cut."""

import pytest

from drover.launch import forecast
from drover.launch.describe import stages_text
from drover.launch.forecast import kept_checkpoints
from drover.launch.plan import Machine, Options, plan
from drover.pipeline.config.loading import load_config
from drover.pipeline.contract.run import Run
from tests.conftest import REPOSITORY
from tests.refusal import table


def request(tmp_path, stages, *overrides):
    config = load_config(REPOSITORY / "configs/demo.yaml", [f"runs_dir={tmp_path}", *overrides])
    return config, plan(config, Run(config), stages, Options("local", "demo.yaml", machine=Machine(2)))


def test_packed_input_is_counted_as_the_text_in_it_and_that_is_called_an_estimate(tmp_path):
    """A filter's files are no input of the corpus."""
    for name in ("a.jsonl", "b.jsonl.gz", "c.JSONL.ZST", "d.parquet", "model.bin"):
        (tmp_path / name).write_bytes(bytes(1000))
    def forecast_of(files):
        config, jobs = request(tmp_path, ["shard", "encode"], "tokenizer.vocab_size=1024", "shard.sources="
                               f"[{{kind: files, name: s, format: jsonl, paths: ['{tmp_path}/{files}']}}]",
                               f"shard.filters=[{{kind: language, path: {tmp_path}/model.bin, languages: [en]}}]")
        return forecast.disk(config, jobs).parts
    assert forecast_of("a*") == {"text shards and their staging": 2000, "token shards": 600}
    assert forecast_of("[a-d].*") == {
        "text shards and their staging, an estimate for packed input": 18_000, "token shards": 5400}


@pytest.mark.parametrize("override, most", table("""
    train.steps=100 -> 3
    train.checkpoint.permanent_every=25 -> 7
    train.checkpoint.copy_to=s3://b/p -> 5""", str, int))
def test_the_most_checkpoints_that_there_are_at_one_time(override, most):
    given = ["train.steps=100", "train.warmup_steps=1", "train.checkpoint={keep: 2, every_steps: 10}", override]
    assert kept_checkpoints(load_config(REPOSITORY / "configs/demo.yaml", given, check=False)) == most


def test_the_plan_shows_how_layers_are_cut():
    config = load_config(REPOSITORY / "configs/llama3_405b.yaml", ["parallel.pp_schedule=1f1b"])
    assert stages_text(config) == ("16 ranks, 16 stages: 7 layers and the embedding in the first, 8 in those between, "
                                   "7 and the output matrix in the last")
