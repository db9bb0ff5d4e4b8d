"""The character models that are compared with nanoGPT: their size and budget, and the chain on their configuration."""

import json
import math
import random
from pathlib import Path

import pytest

from pipeline.config.loading import load_config
from pipeline.contract.manifest import read_manifest
from pipeline.data.text_shards import read_shard, shard_records
from pipeline.records.metrics import read_metrics
from tests.conftest import REPOSITORY, run_stage

CONFIG = REPOSITORY / "configs/shakespeare_char.yaml"
SHAKESPEARE = REPOSITORY.parent / "shared/data/tinyshakespeare.txt"
ROWS = 640
"""65 characters, 256 bytes and 256 special ids, padded to a multiple of 128."""
WORDS = ("the", "and", "to", "of", "my", "in", "you", "is", "that", "not", "with", "his", "your", "be", "this", "thy")


def gpt_parameters(layers: int, width: int, vocabulary: int = 65) -> int:
    """As nanoGPT counts: without the positions' embedding and without biases, the output tied to the embedding."""
    return layers * 12 * width**2 + (2 * layers + 1) * width + vocabulary * width


def play(seed: int, lines: int) -> str:
    """Something that looks like a play to a model of characters."""
    rng = random.Random(seed)
    return "".join(f"{rng.choice(('ROMEO', 'JULIET', 'NURSE'))}:\n{' '.join(rng.choices(WORDS, k=8)).capitalize()}.\n\n"
                   for _ in range(lines))


def run_stages(place: Path, text: Path, *stages: str) -> Path:
    """Some stages on `text`, training only for four steps; the folder of the run."""
    for stage in stages:
        run_stage(stage, CONFIG, f"runs_dir={place}/runs", "name=play", f"shard.sources.0.paths=[{text}]",
                  "train.steps=4", "train.warmup_steps=2", "train.sample_tokens=4", "evaluate.prompt_tokens=4")
    return place / "runs/play"


def heldout_text(run: Path) -> str:
    folder = run / "shard"
    manifest = read_manifest(folder)
    assert manifest is not None
    return "".join(document.text for record in shard_records(manifest, "heldout")
                   for document in read_shard(folder, record))


@pytest.mark.parametrize("name, layers, width", [("shakespeare_char", 4, 128), ("shakespeare_char_gpu", 6, 384)])
def test_the_models_are_no_larger_than_nanogpts(name, layers, width):
    config = load_config(REPOSITORY / f"configs/{name}.yaml")
    assert (config.model.layers, config.model.heads, config.model.dim) == (layers, layers, width)
    parameters = config.model.model_copy(update={"vocab_size": ROWS}).parameter_count
    assert 0.95 * gpt_parameters(layers, width) < parameters <= gpt_parameters(layers, width)
    assert (config.shard.heldout_rule, config.shard.heldout_share) == ("tail", 0.1)


def test_the_small_one_sees_as_many_tokens_as_nanogpts():
    train = load_config(CONFIG).train
    assert (train.steps, train.batch_tokens, train.sequence_length) == (2000, 12 * 64, 64)
    assert train.precision == "fp32"


def test_the_chain_on_a_small_text(tmp_path):
    text = play(1, 400)
    (tmp_path / "play.txt").write_text(text)
    run = run_stages(tmp_path, tmp_path / "play.txt", "shard", "tokenizer", "encode", "train", "convert", "evaluate")
    tail = text[int(len(text) * 0.9):]
    assert heldout_text(run) == tail
    results = json.loads((run / "evaluate/results.json").read_text())["heldout"]
    found = results["overall"]
    assert results["window"] == 64
    assert (found["documents"], found["bytes"], found["targets"]) == (1, len(tail), len(tail) + 1)
    assert found["loss"] == pytest.approx(found["nats"] / found["targets"], abs=1e-6)
    assert found["loss"] < math.log(ROWS) - 0.5, "four steps must teach it which of the ids are in use"
    metrics = read_metrics(run / "train/metrics.jsonl")
    assert [record["step"] for record in metrics] == [1, 2, 3, 4] and metrics[-1]["loss"] < metrics[0]["loss"]
    assert metrics[-1]["heldout_bpb"]["shakespeare"] == pytest.approx(found["bits_per_byte"], rel=1e-4)
