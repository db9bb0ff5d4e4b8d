"""Conversion: what transformers loads computes what was trained, in both export types, and nothing half counts."""

import pytest
import torch

from model.llama import Llama
from pipeline.config.loading import load_config
from pipeline.contract.entry import stage_main
from pipeline.contract.manifest import read_manifest
from pipeline.contract.run import Run
from pipeline.convert import PREFIX, convert
from pipeline.formats.sharded_tensors import CheckpointReader
from pipeline.formats.weights import HuggingFaceWeights
from tests.conftest import run_stage
from tests.stages.small_run import fake_training
from tests.stages.test_damaged_inputs import flipped
from tests.stages.training import reusing, run_train, run_with_faults, train_folder


@pytest.fixture
def spread(tmp_path, encoded):
    """Function: config of a run whose checkpoint holds random weights in pieces of three ranks."""
    def make(**model):
        config = reusing(encoded, tmp_path, model=model)
        fake_training(Run(load_config(config)))
        return config
    return make


def run_convert(config, *overrides):
    return stage_main("convert", convert, ["--config", str(config), *overrides])


def training_model(folder):
    """The model that the run's checkpoint holds."""
    counts = read_manifest(folder / "train").counts
    model = Llama(load_config(folder.parent.parent / "mini.yaml").model.model_copy(
        update={"vocab_size": counts["vocab_size"]}))
    with CheckpointReader(folder / "train" / counts["checkpoint"]) as reader:
        for name, parameter in model.named_parameters():
            reader.read(PREFIX + name, out=parameter)
    return model


def logits(model, vocab_size):
    ids = torch.randint(0, vocab_size, (2, 60), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = model.eval()(ids)
    return getattr(found, "logits", found)


@pytest.mark.parametrize("dtype, changes", [
    ("bfloat16", {"tied_embeddings": True}),
    pytest.param("float32", {"qk_norm": True, "sliding_window": 16, "full_attention_interval": 2},
                 marks=pytest.mark.slow),
    pytest.param("float32", {"qkv_bias": True, "head_dim": 24, "rope_scaling": {
        "kind": "yarn", "factor": 4, "original_context_length": 32}}, marks=pytest.mark.slow),
    ("float32", {"tied_embeddings": True, "no_rope_layer_interval": 2, "sliding_window": 16})],
    ids=["tied", "Qwen3", "biases, wide heads, YaRN", "SmolLM3"])
def test_any_pieces_are_exported_and_compute_what_was_trained(spread, dtype, changes):
    from transformers import AutoModelForCausalLM, AutoTokenizer
    config = spread(**changes)
    assert run_convert(config, "convert.max_shard_mb=0.05", f"convert.dtype={dtype}") == 0
    folder, out = config.parent / "runs/mini", config.parent / "runs/mini/convert/hf"
    exported = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    ours, theirs = (logits(model, exported.config.vocab_size) for model in (training_model(folder), exported))
    assert ours.std() > 0.01 and (ours - theirs).abs().max() < (1e-5 if dtype == "float32" else 0.1)
    counts = read_manifest(folder / "convert").counts
    assert counts["largest_logit_difference"] < 1e-5 and counts["layers_compared"] == 2
    beside = 2 * ("qk_norm" in changes) + 3 * ("qkv_bias" in changes)
    assert counts["tensors_compared"] == 2 * (9 + beside) + 3 - ("tied_embeddings" in changes)
    bos = AutoTokenizer.from_pretrained(out)("def f():").input_ids[0]
    assert bos == exported.config.bos_token_id


def test_what_transformers_has_no_name_for_is_not_exported(spread, capsys):
    assert run_convert(spread(qk_norm=True, no_rope_layer_interval=2)) == 2
    assert "no class of transformers computes: it can be trained, but not exported" in capsys.readouterr().err


@pytest.mark.parametrize("changes", [
    {}, pytest.param({"no_rope_layer_interval": 3, "sliding_window": 16}, marks=pytest.mark.slow)],
    ids=["Llama", "SmolLM3"])
def test_of_a_model_that_does_not_fit_all_layers_are_compared(spread, capsys, changes):
    config = spread(layers=4, **changes)
    assert run_convert(config, "convert.check_memory_gb=1e-6") == 0
    counts, told = read_manifest(config.parent / "runs/mini/convert").counts, capsys.readouterr().out
    assert counts["layers_compared"] == 4 and counts["tensors_compared"] == 4 * 9 + 3
    assert counts["largest_logit_difference"] < 1e-5
    assert "transformers computes it block by block (4 layers)" in told
    assert f"argmax equal on {counts['argmax_equal']} of {counts['tokens_compared']} held-out tokens" in told


def swapped(original):
    """Two matrices of equal shape change places."""
    names = ["layers.1.feed_forward.w1.weight", "layers.1.feed_forward.w3.weight"]
    other = {names[0]: names[1], names[1]: names[0]}

    def stream(path, shapes, read, *arguments, **options):
        return original(path, shapes, lambda name: read(other.get(name, name)), *arguments, **options)
    return stream


def test_weights_that_do_not_fit_are_not_committed(spread, monkeypatch, capsys):
    """A layout mistake must be found by the stage itself, also where transformers does not load the model."""
    import pipeline.formats.huggingface as huggingface
    config = spread()
    monkeypatch.setattr(huggingface, "stream_folder", swapped(huggingface.stream_folder))
    assert run_convert(config, "convert.check_memory_gb=1e-6") == 2
    assert "layers.1.feed_forward.w1.weight in the exported model" in capsys.readouterr().err
    assert read_manifest(config.parent / "runs/mini/convert") is None


def test_a_damaged_part_stops_the_stage(spread, capsys):
    config = spread()
    victim = next((config.parent / "runs/mini/train/checkpoints/step-00000003").glob("*.safetensors"))
    victim.write_bytes(victim.read_bytes()[:-4])
    assert run_convert(config) == 2
    assert victim.name in capsys.readouterr().err and read_manifest(config.parent / "runs/mini/convert") is None


AVERAGE = ["convert.average=[5, 8, 12]", "train.checkpoint.keep=1"]


def test_the_mean_of_named_checkpoints_is_exported_to_the_bit(fresh):
    """What is not there or damaged is refused by name."""
    run_with_faults(fresh, "kill:rank=0,step=10", *AVERAGE, expect=-9)
    run_train(fresh, *AVERAGE)
    saved = sorted((train_folder(fresh) / "checkpoints").iterdir())
    assert [path.name for path in saved] == ["step-00000005", "step-00000008", "step-00000012"]
    said = run_stage("convert", fresh, "convert.average=[4, 12]", expect=2).stderr
    assert "convert.average names step 4, of which there is no whole checkpoint" in said
    assert "(there are those of 5, 8, 12)" in said
    with flipped(saved[0] / "rank-00000.safetensors") as part:
        assert f"{part} is not what training saved" in run_stage("convert", fresh, *AVERAGE, expect=2).stderr
    said = run_stage("convert", fresh, *AVERAGE).stdout
    assert "the mean of step-00000005, step-00000008, step-00000012: " in said
    out = train_folder(fresh).parent / "convert"
    assert read_manifest(out).counts["averaged"] == [path.name for path in saved]
    with HuggingFaceWeights(out / "hf") as exported:
        assert len(exported.shapes) > 10
        for name, shape in exported.shapes.items():
            parts = []
            for path in saved:
                with CheckpointReader(path) as reader:
                    parts.append(reader.read(f"model.{name}").double())
            assert not torch.equal(parts[0], parts[2])
            mean = ((parts[0] + parts[1] + parts[2]) / 3).float()
            assert torch.equal(exported.read(name, (0,) * len(shape), shape), mean), name
