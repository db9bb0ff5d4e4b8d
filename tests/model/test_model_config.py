"""The config's arithmetic against published numbers, and its list of problems."""

import subprocess
import sys

import pydantic
import pytest

from model.config import ModelConfig, RopeScaling
from model.presets import PRESETS
from pipeline.config.explaining import field_texts

# Computed once from Meta's params.json files, independently of this code.
PARAMETERS = {
    "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama2_70b": 68_976_648_192,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3.1_8b": 8_030_261_248,
    "llama3.1_70b": 70_553_706_496,
    "llama3.1_405b": 405_853_388_800,
    "llama3.2_1b": 1_235_814_400,
    "llama3.2_3b": 3_212_749_824,
    "llama3.3_70b": 70_553_706_496,
    "tinyllama_1.1b": 1_100_048_384,
}
LADDER = {"ladder_1m": 950_912, "ladder_15m": 16_592_320, "ladder_42m": 42_082_816, "ladder_110m": 109_529_856,
          "ladder_350m": 323_561_088}
CACHE_BYTES_PER_TOKEN = {
    "llama2_7b": 524_288,
    "llama2_13b": 819_200,
    "llama2_70b": 327_680,
    "llama3_8b": 131_072,
    "llama3_70b": 327_680,
    "llama3.1_405b": 516_096,
    "llama3.2_1b": 32_768,
    "llama3.2_3b": 114_688,
    "tinyllama_1.1b": 22_528,
}
FFN_WIDTHS = {
    "llama2_7b": 11008,
    "llama2_13b": 13824,
    "llama2_70b": 28672,
    "llama3_8b": 14336,
    "llama3_70b": 28672,
    "llama3.1_405b": 53248,
    "llama3.2_1b": 8192,
    "llama3.2_3b": 8192,
}
TRAINING_FLOPS = {  # name: (sequence length, FLOPs per token with full attention)
    "llama2_7b": (4096, 4.6086e10),
    "llama2_13b": (4096, 8.7178e10),
    "llama2_70b": (4096, 4.4450e11),
    "llama3_8b": (8192, 5.7914e10),
    "llama3_70b": (8192, 4.8144e11),
    "llama3.1_405b": (8192, 2.6254e12),
    "llama3.2_1b": (8192, 1.0636e10),
    "llama3.2_3b": (8192, 2.7732e10),
}


def test_every_preset_has_a_golden_count():
    assert PARAMETERS.keys() | LADDER.keys() == PRESETS.keys()


@pytest.mark.parametrize("name", LADDER)
def test_the_ladder_grows_in_depth_and_width_alike(name):
    shape = PRESETS[name].model_copy(update={"vocab_size": 4096 if name == "ladder_1m" else 32000})
    assert shape.parameter_count == LADDER[name] and shape.problems() == []
    assert shape.dim == 64 * shape.layers and shape.head_dim == 64
    size = int(name.removeprefix("ladder_").removesuffix("m")) * 1_000_000
    assert abs(shape.parameter_count / size - 1) < 0.11


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_count(name):
    assert PRESETS[name].problems() == []
    assert PRESETS[name].parameter_count == PARAMETERS[name]


def test_tied_matrix_counts_once_but_multiplies():
    tied, untied = (ModelConfig(vocab_size=1000, tied_embeddings=tied) for tied in (True, False))
    assert untied.parameter_count - tied.parameter_count == 1000 * 256
    assert untied.matmul_parameter_count == tied.matmul_parameter_count
    assert untied.non_embedding_parameter_count == tied.non_embedding_parameter_count


@pytest.mark.parametrize("name", FFN_WIDTHS)
def test_ffn_width_by_rule(name):
    assert PRESETS[name].hidden == FFN_WIDTHS[name]


def test_ffn_matrices_at_width_4096():
    assert 3 * 4096 * ModelConfig(dim=4096).hidden == 135_266_304


def test_explicit_ffn_width_is_not_rounded():
    assert ModelConfig(ffn_dim=1001).hidden == 1001


@pytest.mark.parametrize("name", CACHE_BYTES_PER_TOKEN)
def test_cache_bytes(name):
    assert PRESETS[name].kv_cache_bytes(batch=1, length=1, bytes_per_value=2) == CACHE_BYTES_PER_TOKEN[name]


def test_cache_bytes_of_70b_with_and_without_grouped_queries():
    grouped = PRESETS["llama3_70b"]
    plain = grouped.model_copy(update={"kv_heads": 64})
    assert grouped.kv_cache_bytes(1, 4096, 2) == 1_342_177_280
    assert plain.kv_cache_bytes(1, 4096, 2) == 10_737_418_240
    ratio = [ModelConfig(heads=32, kv_heads=kv).kv_cache_bytes(2, 3, 4) for kv in (32, 1, 8)]
    assert ratio[0] == 32 * ratio[1] and ratio[2] == 8 * ratio[1]


@pytest.mark.parametrize("name", TRAINING_FLOPS)
def test_flops_per_token(name):
    length, golden = TRAINING_FLOPS[name]
    # The golden numbers count the norms' weights as if they multiplied: up to 4e-5 more.
    assert PRESETS[name].flops_per_token(length, causal=False) == pytest.approx(golden, rel=6e-5)


def test_causal_halves_only_attention():
    config = ModelConfig(dim=288, layers=6, heads=6, kv_heads=2, ffn_dim=768, vocab_size=8192)
    matmul = 6 * (6 * (2 * 288 * 288 + 2 * 288 * 96 + 3 * 288 * 768) + 8192 * 288)
    assert config.flops_per_token(256, causal=True) == matmul + 6 * 6 * 288 * 256
    assert config.flops_per_token(256, causal=False) == matmul + 12 * 6 * 288 * 256


def test_counting_needs_the_vocabulary():
    with pytest.raises(ValueError, match="vocab_size is None"):
        _ = ModelConfig().parameter_count


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"dim": 100, "heads": 8}, r"dim \(100\) must be divisible by heads \(8\)"),
        ({"heads": 8, "kv_heads": 3}, r"heads \(8\) must be divisible by kv_heads \(3\)"),
        ({"dim": 24, "heads": 8}, r"24 / 8 = 3\) must be even"),
        ({"layers": 0}, r"layers must be above 0, not 0"),
        ({"kv_heads": -1}, r"kv_heads must be above 0, not -1"),
        ({"norm_eps": 0.0}, r"norm_eps must be above 0"),
        ({"vocab_size": 0}, r"vocab_size must be above 0"),
        ({"ffn_dim": 512, "ffn_dim_multiplier": 1.3}, r"ffn_dim \(512\) and ffn_dim_multiplier \(1.3\)"),
        (
            {"context_length": 16384, "rope_scaling": RopeScaling(factor=0.5)},
            r"factor must be at least 1, not 0.5",
        ),
        (
            {"context_length": 16384, "rope_scaling": RopeScaling(factor=8, low_freq_factor=4)},
            r"\(4.0\) must be above low_freq_factor",
        ),
        (
            {"context_length": 4096, "rope_scaling": RopeScaling(factor=8)},
            r"original_context_length \(8192\) must be below context_length \(4096\)",
        ),
        (
            {"context_length": 64, "rope_scaling": RopeScaling(factor=8, original_context_length=64)},
            r"original_context_length \(64\) must be below context_length \(64\)",
        ),
    ],
)
def test_problems_are_sentences_with_numbers(changes, sentence):
    problems = ModelConfig(**changes).problems()
    assert len(problems) == 1
    with pytest.raises(AssertionError, match=sentence):
        raise AssertionError(problems[0])


def test_all_problems_at_once():
    assert len(ModelConfig(dim=100, kv_heads=3, layers=0, heads=8).problems()) == 3
    assert len(ModelConfig(heads=0, kv_heads=0, dim=0).problems()) == 3


@pytest.mark.parametrize(
    "changes", [{"dmi": 256}, {"dim": "256"}, {"dim": 256.0}, {"rope_theta": float("nan")}]
)
def test_wrong_names_and_types_are_refused(changes):
    with pytest.raises(pydantic.ValidationError):
        ModelConfig(**changes)


def test_every_field_advises():
    for config in (ModelConfig, RopeScaling):
        assert field_texts(config).keys() == config.model_fields.keys()


def test_config_does_not_import_torch():
    code = "import sys, model.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
