"""docs/extending.md does what it says: its module, configuration and command, taken from the page, on a miniature."""

import json
import re
import shutil

import pytest
import yaml

from drover.pipeline.contract.manifest import read_manifest
from drover.pipeline.core.files import read_json, read_lines
from drover.pipeline.records.metrics import read_metrics
from tests.conftest import REPOSITORY, write_config
from tests.pages import checkout, commands, files, typed, warm_stages

pytestmark = pytest.mark.slow

PAGE = (REPOSITORY / "docs/extending.md").read_text()
[COMMAND] = commands("extending")


@pytest.fixture(scope="module")
def extended(tmp_path_factory, corpus):
    """The run that the page makes: its folder, and what was printed."""
    home = warm_stages(checkout(tmp_path_factory.mktemp("extended")))
    texts = shutil.copytree(corpus, home / "texts")
    (texts / "loud.txt").write_text("ALL OF THIS IS SHOUTED, EVERY LAST WORD OF IT.\n" * 20)
    (texts / "eager.txt").write_text("It goes on and on!!! " * 40)
    demo = write_config(home, texts, name="demo", runs_dir=str(home / "runs"),
                        train={"steps": 6, "warmup_steps": 2, "lr": 0.05, "validation_every": 6, "sample_every": 6})
    demo.rename(home / "configs/demo.yaml")
    for name, text in files("extending").items():
        (home / "configs" / name).write_text(text)
    done = typed(COMMAND, home)
    assert done.returncode == 0, done.stdout + done.stderr
    return home / "runs/extended", done.stdout


def test_the_page_names_files_that_are_there():
    for name in re.findall(r"(?:pipeline|model|launch|tests)/[\w/\\.]+\.py", PAGE):
        assert (REPOSITORY / name.replace("\\", "")).is_file(), name


def test_the_filter_dropped_and_changed_documents(extended):
    folder, output = extended
    counts = json.dumps(read_manifest(folder / "shard").counts)
    assert "Shouting" in counts and "in capitals" in counts + output


def test_the_optimizer_trained_with_its_own_state_and_setting(extended):
    folder, _ = extended
    index = read_json(next((folder / "train/checkpoints").glob("step-*/index.json")))
    states = {name.split(".")[0] for name in index["tensors"]}
    assert "momentum_buffer" in states and "exp_avg" not in states
    settings = yaml.safe_load((folder / "config.yaml").read_text())["train"]
    assert settings["optimizer"] == "extras:SGD" and settings["optimizer_settings"] == {"momentum": 0.8}
    losses = [record["loss"] for record in read_metrics(folder / "train/metrics.jsonl")]
    assert len(losses) == 6 and losses[-1] < losses[0]


def test_the_attention_backend_was_the_one_that_ran(extended):
    folder, _ = extended
    assert next(read_lines(folder / "train/events.jsonl"))["attention"] == "ours"


def test_the_sink_kept_the_lowest_loss(extended):
    folder, _ = extended
    lowest = min(read_metrics(folder / "train/metrics.jsonl"), key=lambda record: record["loss"])
    assert read_json(folder / "best.json") == {"step": lowest["step"], "loss": lowest["loss"]}
    assert any(folder.glob("events.out.tfevents.*"))


def test_the_hook_stops_training(extended):
    home = extended[0].parents[1]
    stopped = typed("python -m drover.pipeline.train configs/extended.yaml name=rising reuse=runs/extended "
                    "train.lr=0.06 'train.hooks=[{kind: extras:StopOnRisingNorm, steps: 1}]'", home)
    assert stopped.returncode == 2 and "The gradient norm has risen for 1 steps in a row" in stopped.stderr


def test_the_stage_is_one_like_any_other(extended):
    folder, output = extended
    manifest = read_manifest(folder / "letters")
    assert read_json(folder / "letters/letters.json") == manifest.counts
    assert manifest.counts["documents_in"] == read_manifest(folder / "shard").counts["documents_in"]
    assert "extras" in manifest.code and "letters" in output
    home = folder.parents[1]
    again = typed(COMMAND, home)
    assert again.returncode == 0 and "letters   up to date" in again.stdout
    refused = typed(f"{COMMAND} 'stages.letters.counts=[documents_in, text_bytes]'", home)
    assert refused.returncode != 0 and "stages.letters.counts" in refused.stderr
