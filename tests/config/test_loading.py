"""Configuration files: inheritance, overrides, strictness, and every problem at once with its place."""

import re

import pytest
import torch

from drover.model.huggingface import config_to_json
from drover.pipeline.config.explaining import field_texts
from drover.pipeline.config.loading import config_hash, dump_config, load_config, save_config
from drover.pipeline.config.section import flatten, identity, sections_in
from drover.pipeline.config.training import TrainConfig
from drover.pipeline.config.tree import Config
from drover.pipeline.core.files import write_json
from tests.config.files import refusal
from tests.conftest import REPOSITORY
from tests.hub_server import hub  # noqa: F401 - a fixture
from tests.tiny_models import TOKENIZER_OF_BYTES, for_tokenizer


def test_a_run_of_an_earlier_drover_is_read_without_settings_that_were_removed(written):
    """In a configuration of one's own, and on the command line, they are refused."""
    written("{}", "runs/a/shard/manifest.json")
    text = "name: a\nlaunch: {hosts: [n1, n2], cpus: 3}\n"
    path = written(text, "runs/a/config.yaml")
    assert load_config(path, ["train.lr=1"]).launch.cpus == 3
    assert "unknown key 'launch.hosts'" in refusal(path, "launch.hosts=1")
    assert "unknown key 'launch.hosts'" in refusal(written(text, "runs/b/config.yaml"))


def test_resolved_config_loads_back_equal(tmp_path):
    config = load_config(REPOSITORY / "configs/demo.yaml", ["train.lr=1e-3", "train.mixture={stdlib: 1}"])
    save_config(config, tmp_path / "config.yaml")
    again = load_config(tmp_path / "config.yaml")
    assert again == config and config_hash(again) == config_hash(config)
    assert config_hash(config) != config_hash(load_config(REPOSITORY / "configs/demo.yaml"))


def test_base_is_relative_to_its_file_and_own_values_win(written):
    """Lists are replaced, not joined."""
    written("train: {lr: 0.5, steps: 77, prompts: [a, b]}\nmodel: {dim: 128}\n", "shared/base.yaml")
    written("train: {lr: 0.25}\n", "shared/other.yaml")
    path = written("base: [shared/base.yaml, shared/other.yaml]\nmodel: {layers: 3}\ntrain: {prompts: [c]}\n")
    config = load_config(path)
    assert (config.train.lr, config.train.steps, config.model.dim, config.model.layers) == (0.25, 77, 128, 3)
    assert config.train.prompts == ["c"]
    written("base: ../c.yaml\n", "shared/other.yaml")
    assert "its own base" in refusal(path)


def test_a_tilde_is_the_home_in_every_setting_that_names_a_path(tmp_path, written, no_plugins, monkeypatch):
    """The whole path is what is saved: jobs may have another home. Other texts stay as they are."""
    monkeypatch.setenv("HOME", str(tmp_path))
    text = """
base: HOME/base.yaml
runs_dir: HOME/runs
reuse: HOME/other
plugins: [HOME/tilde_plugin.py]
shard:
  sources: [{kind: files, name: a, paths: [HOME/x/*.txt]}, {kind: hf, name: b, dataset: HOME/d}]
  filters:
    - {kind: language, path: HOME/model.bin, languages: [en]}
    - {kind: decontamination, files: [{path: HOME/t.jsonl, fields: [a]}]}
tokenizer: {path: HOME/t.model}
model: {preset: HOME/weights}
train: {init_from: HOME/weights, tokens_folder: HOME/tokens, prompts: [~/x]}
evaluate: {task_folders: [HOME/tasks]}
launch:
  cluster: HOME/site.yaml
  container: {image: HOME/image.sif, mounts: ["HOME/data:/data"]}
  python: HOME/python
  runner_python: HOME/python
"""
    written("seed: 5", "base.yaml")
    written("partition: ours", "site.yaml")
    written("", "tilde_plugin.py")
    written("model: {layers: 3}", "weights/config.yaml")
    result, expected = (load_config(written(text.replace("HOME", home)), check=False)
                       for home in ("~", str(tmp_path)))
    assert result == expected and (result.seed, result.model.layers, result.launch.partition) == (5, 3, "ours")
    assert dump_config(result).count("~") == 1 and result.train.prompts == ["~/x"]


def test_names_on_the_hub_have_a_commit_from_the_start_of_a_run_on(written, hub, tmp_path):  # noqa: F811
    """Also where the default branch moves, and in a run that reuses this one. Without the Hub the name stays, so that
    all problems of the configuration are reported."""
    config = written("runs_dir: RUNS\nname: a\ntokenizer: {kind: huggingface, path: one/x}\ntrain: {init_from: one/x, "
                     "sequence_length: 128}\nmodel: {preset: one/x}".replace("RUNS", str(tmp_path / "runs")))
    hub.off = True
    assert re.fullmatch(r"(?s).*c\.yaml:5: one/x is no folder here, .* hf download one/x .*", refusal(config))
    assert load_config(config, ["model.preset=null"]).tokenizer.path == "one/x"
    hub.off = False
    shape = config_to_json(for_tokenizer(TOKENIZER_OF_BYTES).config, torch.float32)
    commits = []
    for layers in (2, 3):
        write_json(tmp_path / "theirs/config.json", {**shape, "num_hidden_layers": layers})
        commits.append(hub.push("one/x", tmp_path / "theirs", f"v{layers}"))
    old, new = (f"one/x@{commit}" for commit in commits)
    first = load_config(config, ["train.init_from=one/x@v2"])
    assert (first.tokenizer.path, first.train.init_from, first.model.layers) == (new, old, 3)
    save_config(first, tmp_path / "runs/a/config.yaml")
    hub.off = True
    reusing = ["name=b", f"reuse={tmp_path}/runs/a"]
    for overrides, expected in (([], old), (["name=b"], new), (reusing, old), (["train.init_from=one/x@v2"], old),
                                ([f"train.init_from={new}"], new)):
        assert load_config(config, overrides).train.init_from == expected


@pytest.mark.parametrize("name", ["20261101", "1e3", "1.5", "null", "true", "on"])
def test_a_name_may_look_like_a_number(written, tmp_path, name):
    config = load_config(written("seed: 0\n"), [f"name={name}"])
    assert config.name == name
    save_config(config, tmp_path / "again.yaml")


def test_execution_fields_are_no_identity():
    config = load_config(REPOSITORY / "configs/demo.yaml")
    same = load_config(REPOSITORY / "configs/demo.yaml",
                       ["name=other", "launch.processes=7", "train.micro_batch=1", "train.checkpoint.keep=9",
                        "train.checkpoint.copy_to=s3://b/a", "convert.copy_to=s3://b/c", "train.log_to=[mlflow]",
                        "train.guards={spike: skip, max_skipped: 0}", "evaluate.batch=1"])
    other = load_config(REPOSITORY / "configs/demo.yaml", ["train.lr=0.5"])
    assert identity(config) == identity(same) != identity(other)
    assert "train.checkpoint" not in flatten(identity(config)) and "train.lr" in flatten(identity(config))


def test_a_field_that_came_later_counts_where_it_is_not_as_it_was_before():
    later = {name for name, field in TrainConfig.model_fields.items() if field.json_schema_extra == {"added": True}}
    assert {"optimizer", "phases"} <= later and not later & identity(TrainConfig()).keys()
    changed = identity(TrainConfig(optimizer="muon", param_groups={"a": {"lr": 2.0}}))
    assert changed == {**identity(TrainConfig()), "optimizer": "muon",
                       "param_groups": {"a": {"lr": 2.0, "weight_decay": None}}}


def sections(section):
    """A section, and all that are in it."""
    yield section
    for field in section.model_fields.values():
        for inner in sections_in(field.annotation):
            yield from sections(inner)


def test_every_field_says_what_it_is():
    assert [f"{section.__name__}.{name}" for section in sections(Config)
            for name in section.model_fields.keys() - field_texts(section).keys()] == []
