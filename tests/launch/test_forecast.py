"""What the plan forecasts: the disk that a run takes."""

from drover.launch import forecast
from drover.launch.plan import Machine, Options, plan
from drover.pipeline.config.loading import load_config
from drover.pipeline.contract.run import Run
from tests.conftest import REPOSITORY


def test_the_disk_of_packed_input_and_of_checkpoints(tmp_path):
    """A filter's files are no input of the corpus."""
    for name in ("a.jsonl", "b.jsonl.gz", "c.JSONL.ZST", "d.parquet", "model.bin"):
        (tmp_path / name).write_bytes(bytes(1000))

    def forecast_of(files):
        config = load_config(REPOSITORY / "configs/demo.yaml", [
            f"runs_dir={tmp_path}/runs", "tokenizer.vocab_size=1024", "model.vocab_size=1024", "train.steps=100",
            "train.warmup_steps=1", "train.checkpoint={keep: 2, every_steps: 10, permanent_every: 25}",
            f"shard.sources=[{{kind: files, name: s, format: jsonl, paths: ['{tmp_path}/{files}']}}]",
            f"shard.filters=[{{kind: language, path: {tmp_path}/model.bin, languages: [en]}}]"], check=False)
        jobs = plan(config, Run(config), ["shard", "encode", "train"], Options("local", "demo.yaml",
                                                                               machine=Machine(2)))
        return forecast.disk(config, jobs).parts

    parts = forecast_of("a*")
    checkpoints = parts.pop("up to 7 checkpoints")
    assert checkpoints > 7 * 12 * 1024 * 256, "weights and two moments of at least the embedding"
    assert parts == {"text shards and their staging": 2000, "token shards": 600}
    packed = forecast_of("[a-d].*")
    assert packed["text shards and their staging"] == 18_000 and packed["token shards"] == 5400
