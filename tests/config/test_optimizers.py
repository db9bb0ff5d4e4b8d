"""The choice of an optimizer in the configuration: refused where it cannot work, and no news to runs of before."""

import pytest

from drover.pipeline.config.checks import problems
from drover.pipeline.config.loading import dump_config, load_config
from drover.pipeline.config.parallel import ParallelConfig
from drover.pipeline.config.section import identity
from drover.pipeline.config.training import TrainConfig
from drover.pipeline.config.tree import Config
from drover.pipeline.contract.manifest import differences
from tests.config.files import refusal, write


def config(engine="fsdp2", **train):
    return Config(train=TrainConfig(**train), parallel=ParallelConfig(engine=engine))


@pytest.mark.parametrize(("settings", "words"), [
    ({"optimizer": "lion"}, "train.optimizer 'lion' is not known. There are adamw, muon; one of your own is "),
    ({"optimizer": "nowhere.lion:LION"}, "LION, which cannot be imported (ModuleNotFoundError: No module"),
    ({"optimizer": "tests.training.optimizers.outside:LION"}, "LION, which cannot be imported (AttributeError"),
    ({"optimizer": "tests.training.optimizers.outside:sgd"}, "names a function, not an OptimizerKind: name one that"),
    ({"optimizer": "muon", "engine": "deepspeed"}, "train.optimizer 'muon' works under parallel.engine fsdp2, not "
     "'deepspeed', which lays weights out flat. Take parallel.engine=fsdp2, or train.optimizer=adamw."),
    ({"optimizer": "tests.training.optimizers.outside:SGD", "engine": "deepspeed"}, "not 'deepspeed', which lays"),
    ({"optimizer": "muon", "optimizer_settings": {"beta": 0.9}},
     "has 'beta', which train.optimizer 'muon' does not know; it knows momentum, nesterov, iterations."),
    ({"optimizer_settings": {"momentum": 0.9}}, "has 'momentum', which train.optimizer 'adamw' does not know; it"),
    ({"optimizer": "muon", "optimizer_settings": {"iterations": 2.5}},
     "train.optimizer_settings.iterations is 2.5; like its default 5 of train.optimizer 'muon' it is "
     "to be of type int."),
    ({"optimizer": "muon", "optimizer_settings": {"momentum": True}}, "momentum is True; like its default 0.95"),
    ({"lr_factors": {"output.*": -1.0}}, "train.lr_factors has -1.0 for 'output.*'; a factor is 0 or more."),
])
def test_what_cannot_work_is_refused_before_anything_starts(settings, words):
    found = problems(config(**settings))
    assert any(words in problem for problem in found), found


@pytest.mark.parametrize("settings", [
    {}, {"engine": "deepspeed"}, {"optimizer": "muon", "optimizer_settings": {"momentum": 0, "nesterov": False}},
    {"optimizer": "tests.training.optimizers.outside:SGD", "optimizer_settings": {"momentum": 0.5}},
    {"lr_factors": {"output.*": 0.5}}])
def test_what_can_work_is_not(settings):
    assert problems(config(**settings)) == []


def test_runs_made_before_there_was_a_choice_are_neither_stale_nor_changed():
    before = identity(config().train)
    assert not before.keys() & {"optimizer", "optimizer_settings", "lr_factors"} and before["lr"] == 3e-3
    assert identity(config(optimizer="adamw", optimizer_settings={}, lr_factors={}).train) == before
    changed = identity(config(optimizer="muon", optimizer_settings={"momentum": 0.9}, lr_factors={"a": 2.0}).train)
    found = differences(*({"config": {"train": settings}, "inputs": {}, "files": {}} for settings in (before, changed)))
    assert [str(difference) for difference in found] == [
        "train.lr_factors.a: absent -> 2.0", 'train.optimizer: absent -> "muon"',
        "train.optimizer_settings.momentum: absent -> 0.9"]


def test_settings_load_back_equal_and_a_factor_is_a_number(tmp_path):
    path = write(tmp_path / "mine.yaml", "train: {optimizer: muon, optimizer_settings: {momentum: 0.9}}\n")
    loaded = load_config(path, ["train.optimizer_settings.nesterov=false", "train.lr_factors={output.*: 2}"])
    assert loaded.train.optimizer_settings == {"momentum": 0.9, "nesterov": False}
    assert load_config(write(tmp_path / "again.yaml", dump_config(loaded))) == loaded
    assert "'train.lr_factors.output.*' is 'fast'" in refusal(path, "train.lr_factors={output.*: fast}")
