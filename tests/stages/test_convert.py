"""Conversion: what transformers loads computes what was trained, in both export types, and nothing half counts."""

import pytest
import torch

from drover.model import names
from drover.pipeline.config.loading import load_config
from drover.pipeline.contract.run import Run
from drover.pipeline.contract.state import read_state
from drover.pipeline.core.files import read_json
from drover.pipeline.formats.weights import HuggingFaceWeights, load_model, open_weights
from drover.pipeline.storage.__main__ import main
from drover.pipeline.storage.mirror import COPY, OWNER
from drover.pipeline.storage.store import Store
from tests.refusal import printed
from tests.stages.here import prepare_here, run_here
from tests.stages.small_run import fake_training
from tests.stages.test_damaged_inputs import flipped
from tests.stages.training import (
    changed,
    manifest_of,
    reusing,
    run_train,
    run_with_faults,
    stored_tensors,
    train_folder,
)
from tests.tokenization.conftest import ODD_TEXTS, texts  # noqa: F401 - a fixture


@pytest.fixture
def spread(tmp_path, encoded):
    """Function: config of a run whose checkpoint holds random weights in pieces of three ranks."""
    def make(**model):
        config = reusing(encoded, tmp_path, model=model)
        fake_training(config)
        return config
    return make


def logits(model, vocab_size):
    ids = torch.randint(0, vocab_size, (2, 60), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        result = model.eval()(ids)
    return getattr(result, "logits", result)


@pytest.mark.parametrize("dtype, tensors, changes", [
    ("bfloat16", 4 * 9 + 2, {"tied_embeddings": True, "layers": 4}),
    pytest.param("float32", 2 * 9 + 3, {"head_dim": 24, "rope_scaling": {"factor": 4, "original_context_length": 32}},
                 marks=pytest.mark.slow)], ids=["tied", "wide heads, scaled"])
def test_any_pieces_are_exported_and_compute_what_was_trained(spread, run, dtype, tensors, changes):
    """All layers are compared, block by block."""
    from transformers import AutoModelForCausalLM
    config = spread(**changes)
    output = run("convert", config, "convert.max_shard_mb=0.05", f"convert.dtype={dtype}").out
    folder, out = config.parent / "runs/mini", config.parent / "runs/mini/convert/hf"
    exported = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    with open_weights(folder / "train/checkpoints/step-00000003") as weights:
        trained = load_model(weights, torch.device("cpu"), torch.float32)
    ours, theirs = (logits(model, exported.config.vocab_size) for model in (trained, exported))
    assert ours.std() > 0.01 and (ours - theirs).abs().max() < (1e-5 if dtype == "float32" else 0.1)
    counts, layers = manifest_of(config, "convert").counts, changes.get("layers", 2)
    assert counts["training_logit_error"] < 1e-5 > counts["transformers_logit_error"]
    assert (counts["layers_compared"], counts["tensors_compared"]) == (layers, tensors)
    [line] = [line for line in output.splitlines() if "transformers" in line]
    assert f"argmax equal on {counts['argmax_equal']} of {counts['tokens_compared']} tokens" in line and len(line) < 81


def test_what_cannot_be_exported_is_refused(spread, run, monkeypatch):
    """A damaged checkpoint. A layout mistake is found by the stage itself."""
    config = spread(layers=3)
    victim = next((train_folder(config) / "checkpoints/step-00000003").glob("*.safetensors"))
    complete = victim.read_bytes()
    victim.write_bytes(complete[:-4])
    assert victim.name in run("convert", config, expect=2).err
    victim.write_bytes(complete)
    monkeypatch.setattr(names, "half_rows", lambda weight, heads: weight)
    assert "layers.0.attention.wq.weight in the exported model" in run("convert", config, expect=2).err
    assert manifest_of(config, "convert") is None


AVERAGE = ["convert.average=[5, 8, 12]", "train.checkpoint.keep=1"]


def test_the_mean_of_named_checkpoints_is_exported_to_the_bit(run, fresh):
    """What is not there or damaged is refused by name."""
    run_with_faults(fresh, "kill:rank=0,step=10", *AVERAGE, expect=-9)
    run_train(fresh, *AVERAGE)
    saved = sorted((train_folder(fresh) / "checkpoints").iterdir())
    assert [path.name for path in saved] == ["step-00000005", "step-00000008", "step-00000012"]
    output = run("convert", fresh, "convert.average=[4, 12]", expect=2).err
    assert "convert.average names step 4, but " in output
    assert "(there are those of 5, 8, 12)" in output
    with flipped(saved[0] / "rank-00000.safetensors") as part:
        assert f"{part} is not what training saved" in run("convert", fresh, *AVERAGE, expect=2).err
    assert "the mean of step-00000005, step-00000008, step-00000012: " in run("convert", fresh, *AVERAGE).out
    out = train_folder(fresh).parent / "convert"
    assert manifest_of(fresh, "convert").counts["averaged"] == [path.name for path in saved]
    parts = [stored_tensors(fresh, step=path.name[5:]) for path in saved]
    with HuggingFaceWeights(out / "hf") as exported:
        assert len(exported.shapes) > 10
        for name, shape in exported.shapes.items():
            first, second, third = (stored[f"model.{name}"].double() for stored in parts)
            assert not torch.equal(first, third)
            mean = ((first + second + third) / 3).float()
            assert torch.equal(exported.read(name, (0,) * len(shape), shape), mean), name


@pytest.fixture(scope="module")
def converted(tmp_path_factory, encoded):
    """Config of a miniature run with random weights whose stage convert is done."""
    config = changed(encoded, tmp_path_factory.mktemp("converted"), {})
    prepare_here(config)
    fake_training(config)
    assert run_here("convert", config, "convert.max_shard_mb=0.05") == 0
    return config


def test_llama_cpp_finds_the_scores_of_sentencepiece_merges(converted):
    """Its converter reads tokenizer.model and `add_prefix_space`. That ids are equal: tests/tokenization."""
    from sentencepiece import sentencepiece_model_pb2
    stages = converted.parent / "runs/mini"
    copy = stages / "convert/hf/tokenizer.model"
    assert "hf/tokenizer.model" in [record["path"] for record in manifest_of(converted, "convert").outputs]
    assert copy.read_bytes() == (stages / "tokenizer/tokenizer.model").read_bytes()
    pieces = sentencepiece_model_pb2.ModelProto.FromString(copy.read_bytes()).pieces
    scores = [piece.score for piece in pieces if piece.type == piece.NORMAL]
    assert len(set(scores)) == len(scores) > 200 and scores == sorted(scores, reverse=True)
    before, after = (read_json(stages / folder / "hf/tokenizer_config.json") for folder in ("tokenizer", "convert"))
    assert before["add_prefix_space"] is False and after == before


def test_llama_cpp_finds_no_file_that_it_would_misread(encoded, tmp_path):
    """It would take a unigram model's scores for those of merges."""
    config = changed(encoded, tmp_path, {"tokenizer": {"algorithm": "unigram"}})
    prepare_here(config)
    fake_training(config)
    assert run_here("convert", config) == 0
    stages = config.parent / "runs/mini"
    assert (stages / "tokenizer/tokenizer.model").is_file() and not (stages / "convert/hf/tokenizer.model").exists()




def state(config, url=None):
    given = [f"convert.copy_to={url}"] if url else []
    return Run(load_config(config, ["convert.max_shard_mb=0.05", *given])).state("convert")


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_an_export_that_is_done_is_copied_later_without_being_made_again(converted, run, seaweed, capsys, tmp_path):
    url, folder = seaweed.url_of("models/mini"), converted.parent / "runs/mini/convert"
    before, made, fetched = contents(folder / "hf"), (folder / "hf").stat().st_mtime_ns, tmp_path / "fetched"
    assert state(converted).kind == "done" and state(converted, url).kind == "resumable"
    assert f"upload to {url} is pending" in str(state(converted, url))
    for message in (f", 0 were there already in {url}", "up to date"):
        assert message in run("convert", converted, "convert.max_shard_mb=0.05", f"convert.copy_to={url}").out
    assert state(converted, url).kind == "done" and read_state(folder).status == "done"
    assert contents(folder / "hf") == before and (folder / "hf").stat().st_mtime_ns == made
    assert {entry.path for entry in Store(url).list()} == {*before, COPY, OWNER}

    (tmp_path / "fetched.tmp").mkdir()  # the user's
    printed(capsys, main, url, fetched)
    assert (tmp_path / "fetched.tmp").is_dir() and contents(fetched) == before
    assert "exists already" in printed(capsys, main, url, fetched, expect=2)
