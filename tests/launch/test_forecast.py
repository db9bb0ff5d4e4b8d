"""What the plan forecasts: the disk that a run takes."""

from drover.launch import forecast
from drover.launch.plan import Machine, Options, plan
from drover.pipeline.config.loading import load_config
from drover.pipeline.contract.run import Run
from tests.conftest import REPOSITORY


def test_the_disk_of_checkpoints(tmp_path):
    config = load_config(REPOSITORY / "configs/demo.yaml", [
        f"runs_dir={tmp_path}/runs", "tokenizer.vocab_size=1024", "model.vocab_size=1024", "train.optimizer=adamw",
        "train.steps=100", "train.warmup_steps=1",
        "train.checkpoint={keep: 2, every_steps: 10, permanent_every: 25}"], check=False)
    jobs = plan(config, Run(config), ["train"], Options("local", "demo.yaml", machine=Machine(2)))
    [(name, size)] = forecast.disk(config, jobs).parts.items()
    parameters = forecast.shape_of(config).parameter_count
    assert name == "up to 7 checkpoints" and size == 7 * 12 * parameters
