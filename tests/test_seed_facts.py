"""The facts of the project's seed texts and of Meta's files, as numbers that were derived without this code: the rotary
exercises, the table of shapes, sizes, caches and operations.

NOTE: no change may shrink this file. Each row is a promise.
"""

import math

import pytest
import torch

from drover.model.config import ModelConfig, RopeScaling
from drover.model.llama import Llama
from drover.model.presets import PRESETS
from drover.model.rope import rotary_frequencies, rotate


def rotated(vector, position, base):
    """A query or key at a position, which need not be a whole number."""
    angles = position * rotary_frequencies(len(vector), base)
    x = torch.tensor(vector, dtype=torch.float64)[None, None, None]
    return rotate(x, angles.cos()[None, None], angles.sin()[None, None]).flatten()


def close(found, expected):
    return torch.allclose(found, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-8)


@pytest.mark.parametrize(("vector", "position", "base", "expected"), [
    ([3, 4], 1, 100, [-1.74497702, 4.68562218]),  # exercise 1
    ([1, 0], math.pi / 2, 1e4, [0, 1]), ([0, 2], math.pi, 1e4, [0, -2]),  # 2
    ([1, 0], 0, 1e4, [1, 0]), ([0, 2], math.pi / 2, 1e4, [-2, 0]),  # 3
    ([1, 1, 2, 0], math.pi, 4, [-1, -1, 0, 2]),  # 4
    ([1, 0, 0, 1], 0, 4, [1, 0, 0, 1])])  # 5
def test_the_exercises_rotate_adjacent_pairs(vector, position, base, expected):
    assert close(rotated(vector, position, base), expected)


@pytest.mark.parametrize(("query", "m", "key", "n", "base", "score"), [
    ([1, 0], math.pi / 2, [0, 2], math.pi, 1e4, -2),  # exercise 2
    ([1, 0], 0, [0, 2], math.pi / 2, 1e4, -2),  # 3: the same distance, the same score
    ([1, 1, 2, 0], math.pi, [1, 0, 0, 1], 0, 4, 1)])  # 5
def test_the_exercises_scores_depend_on_the_distance_alone(query, m, key, n, base, score):
    """Also as the real part of complex products. The first is not (q . k) cos(n - m), which would be 0."""
    for shift in (0, 1, 7.5):
        assert float(rotated(query, m + shift, base) @ rotated(key, n + shift, base)) == pytest.approx(score, abs=1e-9)
    pairs = [[complex(*vector[at:at + 2]) for at in range(0, len(vector), 2)] for vector in (query, key)]
    turns = [complex(math.cos(angle), math.sin(angle)) for index in range(len(pairs[0]))
             for angle in [(m - n) * base ** (-2 * index / len(query))]]
    assert sum((q * k.conjugate() * turn).real for q, k, turn in zip(*pairs, turns, strict=True)) == pytest.approx(
        score, abs=1e-9)


@pytest.mark.parametrize(("head_dim", "base", "frequencies"), [
    (2, 100, [1]), (4, 4, [1, 0.5]), (8, 1e4, [1, 0.1, 0.01, 0.001])])
def test_frequencies_of_the_exercises(head_dim, base, frequencies):
    """One of the texts doubles the exponent, and would have 0.0001 third of the last."""
    assert close(rotary_frequencies(head_dim, base), frequencies)


@pytest.mark.parametrize(("head_dim", "factor", "kept", "blended", "golden"), [
    (128, None, 64, 0, {28: 3.21144599e-3, 29: 2.61609925e-3, 32: 1.41421356e-3, 34: 9.38473870e-4, 63: 2.45514079e-6}),
    (128, 8, 29, 6, {28: 3.21144599e-3, 29: 2.16657076e-3, 32: 5.24846161e-4, 34: 1.78507813e-4, 35: 9.55621235e-5,
                     63: 3.06892599e-7}),  # Llama 3.1 and 3.3
    (64, 32, 15, 3, {14: 3.21144599e-3, 15: 1.29054793e-3, 16: 4.29556797e-4, 17: 9.70828780e-5, 18: 1.94616382e-5,
                     31: 9.41830673e-8}),  # 3.2 1B
    (128, 32, 29, 6, {32: 4.29556797e-4, 63: 7.67231497e-8})])  # 3.2 3B
def test_scaled_frequencies(head_dim, factor, kept, blended, golden):
    """How many frequencies stay, how many lie between; all others are divided by the factor."""
    scaled = rotary_frequencies(head_dim, 5e5, factor and RopeScaling(factor=factor))
    assert {index: scaled[index].item() for index in golden} == pytest.approx(golden, rel=5e-9)
    share = rotary_frequencies(head_dim, 5e5) / scaled
    assert int((share == 1).sum()) == kept
    assert int(((share > 1) & (share < (factor or 1) * (1 - 1e-12))).sum()) == blended


# name: width, blocks, heads, KV heads, feed-forward width, vocabulary, context, theta, norm_eps, factor, tied
TABLE = {
    "llama1_7b": (4096, 32, 32, 32, 11008, 32000, 2048, 1e4, 1e-6, None, False),
    "llama1_13b": (5120, 40, 40, 40, 13824, 32000, 2048, 1e4, 1e-6, None, False),
    "llama1_33b": (6656, 60, 52, 52, 17920, 32000, 2048, 1e4, 1e-6, None, False),
    "llama1_65b": (8192, 80, 64, 64, 22016, 32000, 2048, 1e4, 1e-5, None, False),
    "llama2_7b": (4096, 32, 32, 32, 11008, 32000, 4096, 1e4, 1e-5, None, False),
    "llama2_13b": (5120, 40, 40, 40, 13824, 32000, 4096, 1e4, 1e-5, None, False),
    "llama2_70b": (8192, 80, 64, 8, 28672, 32000, 4096, 1e4, 1e-5, None, False),
    "llama3_8b": (4096, 32, 32, 8, 14336, 128256, 8192, 5e5, 1e-5, None, False),
    "llama3_70b": (8192, 80, 64, 8, 28672, 128256, 8192, 5e5, 1e-5, None, False),
    "llama3.1_8b": (4096, 32, 32, 8, 14336, 128256, 131072, 5e5, 1e-5, 8, False),
    "llama3.1_70b": (8192, 80, 64, 8, 28672, 128256, 131072, 5e5, 1e-5, 8, False),
    "llama3.1_405b": (16384, 126, 128, 8, 53248, 128256, 131072, 5e5, 1e-5, 8, False),
    "llama3.2_1b": (2048, 16, 32, 8, 8192, 128256, 131072, 5e5, 1e-5, 32, True),
    "llama3.2_3b": (3072, 28, 24, 8, 8192, 128256, 131072, 5e5, 1e-5, 32, True),
    "llama3.3_70b": (8192, 80, 64, 8, 28672, 128256, 131072, 5e5, 1e-5, 8, False),
    "tinyllama_1.1b": (2048, 22, 32, 4, 5632, 32000, 2048, 1e4, 1e-5, None, False),
}
LADDER = {"ladder_1m": 950_912, "ladder_15m": 16_592_320, "ladder_42m": 42_082_816, "ladder_110m": 109_529_856,
          "ladder_350m": 336_380_928}


def test_every_preset_has_a_row():
    assert PRESETS.keys() == TABLE.keys() | LADDER.keys()


@pytest.mark.parametrize("name", TABLE)
def test_the_table_of_shapes(name):
    shape = PRESETS[name]
    scaling = shape.rope_scaling
    assert (shape.dim, shape.layers, shape.heads, shape.kv_heads, shape.hidden, shape.vocab_size, shape.context_length,
            shape.rope_theta, shape.norm_eps, scaling and scaling.factor, shape.tied_embeddings) == TABLE[name]
    assert shape.problems() == [] and shape.head_width == (64 if name in ("llama3.2_1b", "tinyllama_1.1b") else 128)
    if scaling is not None:
        assert (scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_context_length) == (1, 4, 8192)


# name: parameters, gigabytes in 16 bits, bytes of the KV cache for a token in 16 bits
SIZES = {
    "llama1_7b": (6_738_415_616, 13.48, 524_288),
    "llama1_13b": (13_015_864_320, 26.03, 819_200),
    "llama1_33b": (32_528_943_616, 65.06, 1_597_440),
    "llama1_65b": (65_285_660_672, 130.57, 2_621_440),
    "llama2_7b": (6_738_415_616, 13.48, 524_288),
    "llama2_13b": (13_015_864_320, 26.03, 819_200),
    "llama2_70b": (68_976_648_192, 137.95, 327_680),
    "llama3_8b": (8_030_261_248, 16.06, 131_072),
    "llama3_70b": (70_553_706_496, 141.11, 327_680),
    "llama3.1_8b": (8_030_261_248, 16.06, 131_072),
    "llama3.1_70b": (70_553_706_496, 141.11, 327_680),
    "llama3.1_405b": (405_853_388_800, 811.71, 516_096),
    "llama3.2_1b": (1_235_814_400, 2.47, 32_768),
    "llama3.2_3b": (3_212_749_824, 6.43, 114_688),
    "llama3.3_70b": (70_553_706_496, 141.11, 327_680),
    "tinyllama_1.1b": (1_100_048_384, 2.20, 22_528),
}


@pytest.mark.parametrize("name", TABLE)
def test_parameters_and_caches(name):
    shape = PRESETS[name]
    count, gigabytes, cache = SIZES[name]
    assert (shape.parameter_count, shape.kv_cache_bytes(1, 1, 2)) == (count, cache)
    assert round(2 * shape.parameter_count / 1e9, 2) == gigabytes


@pytest.mark.parametrize("name", ["llama3.2_1b", "llama2_7b", "llama3.1_405b"])
def test_the_network_itself_has_as_many_parameters(name):
    with torch.device("meta"):
        model = Llama(PRESETS[name])
    assert sum(parameter.numel() for parameter in model.parameters()) == SIZES[name][0]


@pytest.mark.parametrize("name", LADDER)
def test_the_ladder(name):
    shape = PRESETS[name].with_vocabulary(4096 if name == "ladder_1m" else 32000)
    assert shape.parameter_count == LADDER[name] and shape.problems() == []
    assert shape.dim == 64 * min(shape.layers, 16) and shape.head_width == 64


@pytest.mark.parametrize(("name", "length", "gibibytes"), [
    ("llama2_7b", 8192, 4.0), ("llama2_13b", 8192, 6.25), ("llama2_70b", 8192, 2.5), ("llama3_8b", 8192, 1.0),
    ("llama3.1_8b", 131072, 16.0), ("llama3.1_70b", 131072, 40.0), ("llama3.1_405b", 131072, 63.0),
    ("llama3.2_1b", 131072, 4.0), ("llama3.2_3b", 131072, 14.0), ("llama2_70b", 4096, 1.25)])
def test_caches_of_a_sequence(name, length, gibibytes):
    assert PRESETS[name].kv_cache_bytes(1, length, 2) == gibibytes * 2**30


def test_the_texts_example_of_a_cache_with_and_without_grouped_queries():
    """A text says 5.24 and 0.66 GB, half of what its own formula gives. All, one and eight KV heads are as 32:1:8."""
    grouped = PRESETS["llama2_70b"]
    every = grouped.model_copy(update={"kv_heads": 64})
    assert every.kv_cache_bytes(1, 4096, 2) == 10_737_418_240 == 8 * grouped.kv_cache_bytes(1, 4096, 2)
    caches = [PRESETS["llama3_8b"].model_copy(update={"kv_heads": heads}).kv_cache_bytes(1, 1, 2)
              for heads in (32, 1, 8)]
    assert [cache // caches[1] for cache in caches] == [32, 1, 8]


@pytest.mark.parametrize(("dim", "multiplier", "multiple", "width"), [
    (4096, None, 256, 11008), (5120, None, 256, 13824), (6656, None, 256, 17920), (8192, None, 256, 22016),
    (4096, 1.3, 1024, 14336), (8192, 1.3, 4096, 28672), (16384, 1.2, 4096, 53248), (3072, 1.0, 256, 8192),
    (2048, 1.5, 256, 8192)])  # the last: 5461, then 8191
def test_the_rule_for_the_feed_forward_width(dim, multiplier, multiple, width):
    assert ModelConfig(dim=dim, ffn_dim_multiplier=multiplier, multiple_of=multiple).hidden == width


def test_swiglu_costs_about_as_much_as_two_matrices_of_four_times_the_width():
    shape = PRESETS["llama2_7b"]
    assert 3 * shape.dim * shape.hidden == 135_266_304
    assert 2 * shape.dim * 4 * shape.dim == 134_217_728


@pytest.mark.parametrize(("name", "length", "operations"), [
    ("llama2_7b", 4096, 4.6086e10), ("llama2_13b", 4096, 8.7178e10), ("llama2_70b", 4096, 4.4450e11),
    ("llama3_8b", 8192, 5.7914e10), ("llama3_70b", 8192, 4.8144e11), ("llama3.1_405b", 8192, 2.6254e12),
    ("llama3.2_1b", 8192, 1.0636e10), ("llama3.2_3b", 8192, 2.7732e10)])
def test_operations_to_train_on_a_token(name, length, operations):
    """With full attention. The numbers count the norms' weights as if they multiplied: up to 4e-5 more."""
    assert PRESETS[name].flops_per_token(length, causal=False) == pytest.approx(operations, rel=6e-5)
