"""The choice of an optimizer in the configuration: refused where it cannot work, and no news to runs of before."""

from drover.pipeline.config.loading import dump_config, load_config
from drover.pipeline.config.section import identity
from drover.pipeline.config.training import TrainConfig
from drover.pipeline.contract.manifest import differences
from tests.config.files import write


def test_runs_made_before_there_was_a_choice_are_neither_stale_nor_changed():
    before = identity(TrainConfig())
    assert not before.keys() & {"optimizer", "optimizer_settings", "lr_factors"} and before["lr"] == 3e-3
    assert identity(TrainConfig(optimizer="adamw", optimizer_settings={}, lr_factors={})) == before
    changed = identity(TrainConfig(optimizer="muon", optimizer_settings={"momentum": 0.9}, lr_factors={"a": 2.0}))
    found = differences(*({"config": {"train": settings}, "inputs": {}, "files": {}} for settings in (before, changed)))
    assert [str(difference) for difference in found] == [
        "train.lr_factors.a: absent -> 2.0", 'train.optimizer: absent -> "muon"',
        "train.optimizer_settings.momentum: absent -> 0.9"]


def test_settings_load_back_equal_and_a_factor_is_a_number(tmp_path):
    path = write(tmp_path / "mine.yaml", "train: {optimizer: muon, optimizer_settings: {momentum: 0.9}}\n")
    loaded = load_config(path, ["train.optimizer_settings.nesterov=false", "train.lr_factors={output.*: 2}"])
    assert loaded.train.optimizer_settings == {"momentum": 0.9, "nesterov": False}
    assert load_config(write(tmp_path / "again.yaml", dump_config(loaded))) == loaded
