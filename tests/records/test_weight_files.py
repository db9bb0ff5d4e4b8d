"""Which files decide the weights in a folder, by its form."""

import pytest

from drover.launch.checks import _refuse_absent_files
from drover.pipeline.config.loading import load_config
from drover.pipeline.core.errors import UserError
from drover.pipeline.records.weight_files import input_files, weight_files, weights_folder
from tests.refusal import refused, table


def write(folder, names):
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(name)
    return folder


@pytest.mark.parametrize(("decide", "others"), table("""
    COMPLETE.json -> index.json rank-00000.safetensors
    config.json model-00001-of-00002.safetensors model-00002-of-00002.safetensors model.safetensors.index.json -> \
tokenizer.json README.md
    config.json model.safetensors -> params.json original/consolidated.00.pth original/params.json""",
                                                str.split, str.split))
def test_what_decides_the_weights_is_named_and_nothing_else(decide, others, tmp_path):
    """Of a checkpoint, in Hugging Face's form, and with Meta's files next to it."""
    assert [path.name for path in weight_files(write(tmp_path / "x", decide + others))] == decide


def test_of_a_run_it_is_the_newest_whole_checkpoint(tmp_path):
    run = write(tmp_path / "run", ["config.yaml"])
    (run / "config.yaml").write_text("train: {checkpoint: {every_steps: 250}}\n")
    refused(UserError, f"has no complete checkpoint yet.*one every 250 steps.*drover stop {run}", weights_folder, run)
    for step, names in ((4, ["COMPLETE.json"]), (8, ["COMPLETE.json"]), (12, ["index.json"])):
        write(run / f"train/checkpoints/step-{step:08d}", names)
    assert weights_folder(run).name == "step-00000008"


@pytest.mark.parametrize("path", ["empty", "none"])
def test_a_place_without_weights_is_named_with_the_setting(tmp_path, path):
    write(tmp_path / "empty", ["notes.txt"])
    (tmp_path / "c.yaml").write_text(f"train: {{init_from: {tmp_path / path}}}\n")
    refused(UserError, f"train.init_from: .*{path}", input_files, load_config(tmp_path / "c.yaml", check=False))
    (tmp_path / "c.yaml").write_text("name: c\n")
    assert input_files(load_config(tmp_path / "c.yaml", check=False)) == []


def test_metas_format_is_refused_with_what_to_download(tmp_path):
    folder = write(tmp_path / "theirs", ["params.json", "consolidated.00.pth"])
    message = "Meta's format .*download the safetensors of the same model"
    refused(UserError, f"{folder} holds no weights: .*{message}", weight_files, folder)
    (tmp_path / "c.yaml").write_text(f"train: {{init_from: {folder}}}\n")
    refused(UserError, f"(?s)train: train.init_from: .*{message}", _refuse_absent_files,
            load_config(tmp_path / "c.yaml", check=False), ["train"])
    (tmp_path / "c.yaml").write_text(f"model: {{preset: {folder}}}\n")
    refused(UserError, rf"(?s)c\.yaml:1: .*{message}", load_config, tmp_path / "c.yaml")
