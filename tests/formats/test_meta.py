"""Meta's form both ways: against a reference of its layout written for the tests, and against transformers."""

import json
import os
import pickle
import random
import struct

import pytest
import torch

from drover.model.config import ModelConfig, RopeScaling
from drover.model.presets import PRESETS
from drover.pipeline.core.errors import UserError
from drover.pipeline.formats.meta_params import config_of, params_of, read_params
from drover.pipeline.formats.weights import open_weights
from drover.tools.weights import convert
from tests.formats import meta_reference
from tests.formats.cutting import read_alike
from tests.formats.meta_reference import parts_of, write_folder
from tests.formats.test_huggingface import built, write
from tests.refusal import refused, table

WIDE = ModelConfig(dim=64, layers=2, heads=16, kv_heads=4, ffn_dim=96, vocab_size=160, context_length=4096)
EXTENDED = WIDE.model_copy(update={"context_length": 16384, "rope_scaling": RopeScaling(factor=8)})
LLAMA2 = WIDE.model_copy(update={"rope_theta": 10000.0, "kv_heads": 16})
TIED = WIDE.model_copy(update={"tied_embeddings": True})


def params_for(config, **changes):
    """params.json by hand, for a width that Llama's rule gives with multiple_of 96."""
    return {"dim": config.dim, "n_layers": config.layers, "n_heads": config.heads, "n_kv_heads": config.kv_heads,
            "vocab_size": config.vocab_size, "ffn_dim_multiplier": 0.5, "multiple_of": 96, "norm_eps": config.norm_eps,
            "rope_theta": config.rope_theta} | changes


def state_of(model):
    return {name: tensor.detach() for name, tensor in model.state_dict().items()
            if name != "output.weight" or not model.config.tied_embeddings}


def as_meta(folder, model, parts, embedding_columns=False, **changes):
    config = model.config
    state = parts_of(state_of(model), parts, config.kv_heads, embedding_columns)
    return write_folder(folder, state, params_for(config, **changes))


def carried(source, target, form, parts=1, dtype=None, shard_bytes=10**9):
    convert(source, target, form, dtype, shard_bytes, parts)
    return target


@pytest.mark.parametrize(("config", "parts", "dtype"), [
    (EXTENDED, 1, torch.float32), (EXTENDED, 16, torch.bfloat16), (LLAMA2, 8, torch.float16), (TIED, 2, torch.float32)])
def test_what_is_written_are_metas_parts_and_params_and_every_bit_comes_back(config, parts, dtype, tmp_path):
    """Our names and the order of our rows are Meta's, and tests/formats compares the network."""
    model, source = built(config, dtype), tmp_path / "hf"
    write(model, source, dtype=dtype, max_shard_bytes=40_000)
    made = carried(source, tmp_path / "meta", "meta", parts)
    state, params = meta_reference.read_folder(made)
    expected = parts_of(model.state_dict(), parts, config.kv_heads, config is LLAMA2)
    assert [part.keys() for part in state] == [part.keys() for part in expected]
    for part, known in zip(state, expected, strict=True):
        assert all(torch.equal(part[name], tensor) for name, tensor in known.items())
    assert params | {"ffn_dim_multiplier": 0.5, "multiple_of": 96} == params_for(
        config, n_kv_heads=max(config.kv_heads, parts), **({"use_scaled_rope": True} if config.rope_scaling else {}))
    here = carried(carried(made, tmp_path / "drover", "drover", shard_bytes=50_000), tmp_path / "back", "hf",
                   shard_bytes=40_000)
    names = [path.name for path in source.iterdir()]
    assert sum(name.endswith(".safetensors") for name in names) > 1
    for name in names:
        assert (here / name).read_bytes() == (source / name).read_bytes(), name


FOREIGN = {
    "one part": lambda folder, model: as_meta(folder, model, 1),
    "columns, no vocabulary": lambda folder, model: as_meta(folder, model, 4, True, vocab_size=-1),
    "more parts than heads": lambda folder, model: as_meta(folder, model, 16),
    "copies counted": lambda folder, model: as_meta(folder, model, 16, n_kv_heads=16),
    "nested": lambda folder, model: write_folder(
        folder, parts_of(state_of(model), 2, 4, False), {"model": params_for(model.config), "unknown": 1}),
    "frequencies": lambda folder, model: write_folder(
        folder, [{**part, "rope.freqs": torch.ones(2)} for part in parts_of(state_of(model), 2, 4, True)],
        params_for(model.config, max_batch_size=3)),
}


@pytest.mark.parametrize("form", FOREIGN)
def test_every_rectangle_is_read_from_the_part_that_holds_it(form, tmp_path):
    model, chance = built(WIDE), random.Random(form)
    with open_weights(FOREIGN[form](tmp_path / "meta", model)) as weights:
        assert (weights.form, weights.config.kv_heads, weights.config.vocab_size) == ("meta", 4, 160)
        assert weights.config.hidden == WIDE.hidden and not weights.config.tied_embeddings
        read_alike(weights, model, chance)


@pytest.mark.parametrize(("stored", "parts"), [("once", 1), ("once", 4), ("twice", 4), ("shared", 1)])
def test_one_matrix_for_both_ends_is_seen_however_it_is_stored(stored, parts, tmp_path):
    model = built(TIED)
    state = parts_of(state_of(model), parts, 4, False)
    for part in state if stored != "once" else []:
        matrix = part["tok_embeddings.weight"]
        part["output.weight"] = matrix if stored == "shared" else matrix.clone()
    with open_weights(write_folder(tmp_path / "meta", state, params_for(TIED))) as weights:
        assert weights.config.tied_embeddings and "output.weight" not in weights.shapes
        assert torch.equal(weights.read("tok_embeddings.weight"), model.tok_embeddings.weight)
    made = carried(tmp_path / "meta", tmp_path / "again", "meta", parts)
    assert "output.weight" in torch.load(made / "consolidated.00.pth", weights_only=True)
    assert (made / "consolidated.00.pth").stat().st_size < 4 * TIED.parameter_count / parts + 20_000, "room for one"


@pytest.mark.parametrize(("name", "published"), table("""
    llama1_13b -> {"dim": 5120, "multiple_of": 256, "n_heads": 40, "n_layers": 40, "norm_eps": 1e-06, "vocab_size": -1}
    llama1_65b -> {"dim": 8192, "multiple_of": 256, "n_heads": 64, "n_layers": 80, "norm_eps": 1e-05, "vocab_size": -1}
    llama2_7b -> {"dim": 4096, "multiple_of": 256, "n_heads": 32, "n_layers": 32, "norm_eps": 1e-05, "vocab_size": -1}
    llama3.1_8b -> {"dim": 4096, "ffn_dim_multiplier": 1.3, "multiple_of": 1024, "n_heads": 32, "n_kv_heads": 8, \
"n_layers": 32, "norm_eps": 1e-05, "rope_theta": 500000.0, "use_scaled_rope": true, "vocab_size": 128256}
    llama3.2_1b -> {"dim": 2048, "ffn_dim_multiplier": 1.5, "multiple_of": 256, "n_heads": 32, "n_kv_heads": 8, \
"n_layers": 16, "norm_eps": 1e-05, "rope_theta": 500000.0, "use_scaled_rope": true, "vocab_size": 128256}"""))
def test_the_published_params_are_the_presets(name, published, tmp_path):
    (tmp_path / "params.json").write_text(published)
    known = PRESETS[name]
    found = config_of(read_params(tmp_path), vocab_size=known.vocab_size, kv_heads=known.kv_heads,
                      tied=known.tied_embeddings)
    assert known.differences(found) == {}


def test_any_width_can_be_said():
    for width in (*range(1, 400, 7), 14335, 14336, 53248):
        for dim in (32, 64, 4096):
            config = WIDE.model_copy(update={"dim": dim, "ffn_dim": width})
            params = json.loads(json.dumps(params_of(config, 1)))
            assert config_of(params, vocab_size=160, kv_heads=4, tied=False).hidden == width


@pytest.mark.parametrize(("changes", "parts", "said"), table(r"""
    {"vocab_size": 161} -> 2 -> the vocabulary \(161\).*Give --parts 1\.
    {"heads": 4} -> 8 -> heads \(4\).*Give --parts 1 or 2 or 4\.
    {"kv_heads": 16, "heads": 16, "ffn_dim": 100} -> 8 -> feed-forward width \(100\)
    {"qk_norm": true} -> 1 -> qk_norm False, and here it is True. Give --format hf
    {"head_dim": 6} -> 1 -> head_dim 4, and here it is 6. Give --format hf
    {"qkv_bias": true} -> 1 -> qkv_bias False.*Give --format hf
    {"sliding_window": 8} -> 1 -> sliding_window None, and here it is 8.*Give --format hf
    {"no_rope_layer_interval": 2} -> 1 -> no_rope_layer_interval None.*Give --format hf
    {"context_length": 16384, "rope_scaling": {"factor": 32}} -> 1 -> assume rope_scaling factor 8 .*it is factor 32
    """, json.loads, int))
def test_what_metas_form_cannot_hold_is_refused_and_leaves_nothing(changes, parts, said, tmp_path):
    write(built(ModelConfig.model_validate({**WIDE.model_dump(), **changes})), tmp_path / "hf")
    refused(UserError, said, convert, tmp_path / "hf", tmp_path / "meta", "meta", None, 10**9, parts)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


class Hostile:
    """Unpickled by anything that executes what it is told, it makes a file."""

    def __init__(self, path, call=os.mkdir, *more):
        self.told = call, (str(path), *more)

    def __reduce__(self):
        return self.told


@pytest.fixture
def folder(tmp_path):
    return as_meta(tmp_path / "meta", built(WIDE), 2)


def test_nothing_in_a_file_is_executed(folder, tmp_path):
    part = folder / "consolidated.01.pth"
    sound = torch.load(part, weights_only=True)
    torch.save({**sound, "norm.weight": Hostile(tmp_path / "executed")}, part)
    refused(UserError, "nothing of it was executed .*posix", open_weights, folder)
    part.write_bytes(pickle.dumps(Hostile(tmp_path / "executed")))
    refused(UserError, "is not a zip file", open_weights, folder)
    torch.save({**sound, "extra": [1, 2]}, part)
    refused(UserError, "'extra', which is not a plain tensor", open_weights, folder)
    torch.save([1], part)
    refused(UserError, "contains a list", open_weights, folder)
    assert not (tmp_path / "executed").exists()
    pickle.loads(pickle.dumps(Hostile(tmp_path / "executed")))
    assert (tmp_path / "executed").exists()  # it would have


def test_a_forged_size_and_a_missing_part_are_said(folder):
    """Files that are cut off anywhere are tried by tests/test_fuzz.py."""
    part = folder / "consolidated.00.pth"
    valid, said = part.read_bytes(), b"M" + struct.pack("<H", 160 // 2 * 64)
    assert valid.count(said) == 2  # how many values the pickle says that lie in an embedding
    part.write_bytes(valid.replace(said, b"M" + struct.pack("<H", 10)))
    refused(UserError, "is truncated", open_weights, folder)
    part.unlink()
    refused(UserError, "of these numbers there are: 01", open_weights, folder)


@pytest.mark.parametrize(("change", "said"), table(r"""
    {"dim": 96} -> dim is 96, and the embedding is 64 wide
    {"multiple_of": 256} -> w1.weight is \[48, 64\]; by its params.json in 2 parts it is \[128, 64\]
    {"n_layers": 3} -> layers.2.* is missing
    {"n_layers": 1} -> layers.1.* is no parameter
    {"vocab_size": 161} -> vocab_size is 161
    {"n_heads": 5} -> cannot be built: .*divisible
    {"n_kv_heads": 0.5} -> n_kv_heads
    {"n_layers": 1000000000000} -> n_layers is
    {"use_qk_norm": true} -> use_qk_norm
    {"moe_args": {"num_experts": 8}} -> moe_args""", json.loads))
def test_params_that_do_not_fit_are_said(folder, change, said):
    params = json.loads((folder / "params.json").read_text())
    (folder / "params.json").write_text(json.dumps(params | change))
    refused(UserError, said, open_weights, folder)


def test_params_that_are_none_are_said(folder):
    for text in ('{"dim": 64}', "[" * 5000):
        (folder / "params.json").write_text(text)
        refused(UserError, "params.json", open_weights, folder)


def test_parts_of_two_models_are_told_apart(folder, tmp_path):
    other = built(WIDE.model_copy(update={"layers": 2}))
    with torch.no_grad():
        other.norm.weight.add_(1)
    as_meta(tmp_path / "other", other, 2)
    (tmp_path / "other/consolidated.01.pth").rename(folder / "consolidated.01.pth")
    with open_weights(folder) as weights, pytest.raises(UserError, match=r"should have the same norm\.weight"):
        weights.read("norm.weight")


def test_metas_folder_is_read_by_its_params_when_these_are_edited(tmp_path):
    write(built(WIDE), tmp_path / "hf")
    made = carried(tmp_path / "hf", tmp_path / "meta", "meta", 8)
    with open_weights(made) as weights:
        assert (weights.config.context_length, weights.config.kv_heads) == (4096, 4)
    params = json.loads((made / "params.json").read_text())
    (made / "params.json").write_text(json.dumps(params | {"rope_theta": 1e6}))
    with open_weights(made) as weights:
        assert (weights.config.rope_theta, weights.config.context_length, weights.config.kv_heads) == (1e6, 8192, 4)


def test_another_output_matrix_than_the_recorded_tie_says_is_refused(tmp_path):
    """Meta's files do not say whether a model is tied, but our record beside them does."""
    source = tmp_path / "hf"
    write(built(TIED), source)
    made = carried(source, tmp_path / "meta", "meta")
    part = torch.load(made / "consolidated.00.pth")
    torch.save(part | {"output.weight": part["output.weight"] + 1}, made / "consolidated.00.pth")
    refused(UserError, "tied_embeddings is true.*output.weight has other values", open_weights, made)
