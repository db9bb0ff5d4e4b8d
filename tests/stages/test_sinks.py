"""Loggers in the configuration of the train stage."""

import pytest

from drover.pipeline.config.loading import load_config
from drover.pipeline.config.section import identity
from drover.pipeline.config.training import TrainConfig
from drover.pipeline.core.errors import UserError


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
