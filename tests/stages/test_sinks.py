"""Log sinks in the train stage: sinks of one's own, failures, and wrong settings."""

import pytest

from drover.pipeline.config.loading import load_config
from drover.pipeline.config.section import identity
from drover.pipeline.config.training import TrainConfig
from drover.pipeline.core.errors import UserError
from tests.conftest import REPOSITORY
from tests.stages.training import curve, events, run_train
from tests.training.sinks.reading import board_points

OWN = '''
from pathlib import Path
from drover.pipeline.training.sinks.base import SinkSettings

class Broken(SinkSettings):
    """Fails at a step."""
    step: int = 3
    """At which."""

    def open(self, about):
        return Told(about.run_folder / "told.txt", self.step)

class Told:
    def __init__(self, path, fails):
        self.path, self.fails = path, fails

    def step(self, record):
        if record["step"] == self.fails:
            raise ConnectionError("nobody answers")
        self._write(f"step {record['step']}")

    def sample(self, step, prompt, text):
        self._write(f"sample {step}")

    def event(self, kind, details):
        self._write(kind)

    def close(self):
        self._write("close")

    def _write(self, text):
        with open(self.path, "a") as file:
            file.write(text + "\\\\n")
'''.replace("\\\\", "\\")


@pytest.mark.slow
def test_a_sink_of_ones_own_that_fails_changes_no_bit_and_is_said_once(fresh, tmp_path):
    (tmp_path / "my_sinks.py").write_text(OWN)
    run = run_train(fresh, "train.log_to=[{kind: 'my_sinks:Broken', step: 3}, tensorboard]", ranks=2,
                    cold=True, PYTHONPATH=f"{REPOSITORY}:{tmp_path}")
    whole = run_train(fresh, "name=whole", "train.log_to=[]", ranks=2)
    assert curve(fresh) == curve(fresh, "whole") and "is disabled" not in whole.stdout
    assert run.stdout.count("the logger my_sinks:Broken is disabled: ConnectionError: nobody answers") == 1
    [event] = events(fresh, "sink_failed")
    refused = run_train(fresh, "name=none", "train.log_to=[{kind: 'no_such_module:Sink'}]", expect=2)
    assert "train.log_to.0.kind names no_such_module:Sink, which cannot be imported" in refused.stderr
    assert (event["sink"], event["error"]) == ("my_sinks:Broken", "ConnectionError: nobody answers")
    told = (tmp_path / "runs/mini/told.txt").read_text().split("\n")
    assert told[:3] == ["start", "step 1", "step 2"] and told[3:] == ["close", ""]
    board = fresh.parent / "runs/mini/tensorboard"
    assert [step for step, _ in board_points(board, "train/loss")] == list(range(1, 13))
    assert not (fresh.parent / "runs/whole/tensorboard").exists()


def test_wrong_settings_are_named(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("name: a\n")
    for value, said in (
            ("[wandbb]", "is 'wandbb' (str): there is no log sink of this kind; did you mean 'wandb'?"),
            ("[tensorboard, {kind: wandb, projekt: x}]",
             "unknown key 'train.log_to.1.projekt'; did you mean 'project'?"),
            ("[mlflow, {kind: mlflow}]", "train.log_to has 2 sinks of kind 'mlflow'"),
            ("tensorboard", "'train.log_to' is 'tensorboard' (str)")):
        with pytest.raises(UserError) as caught:
            load_config(path, [f"train.log_to={value}"])
        assert said in str(caught.value)


def test_where_it_is_logged_makes_nothing_stale():
    plain, other = TrainConfig(), TrainConfig(log_to=["mlflow"])
    assert [[sink.kind for sink in train.log_to] for train in (plain, other)] == [["tensorboard"], ["mlflow"]]
    assert identity(plain) == identity(other) and "log_to" not in identity(other)
