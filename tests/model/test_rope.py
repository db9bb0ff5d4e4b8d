"""Rotary embedding: worked exercises, golden frequencies, and the property it exists for."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.config import ModelConfig, RopeScaling
from model.presets import PRESETS
from model.rope import RotaryTable, cos_sin, rotary_frequencies, rotate


def turned(vector: list[float], position: float, theta: float) -> torch.Tensor:
    """One head's vector at one position, in float64."""
    x = torch.tensor(vector, dtype=torch.float64).view(1, 1, 1, -1)
    positions = torch.tensor([[position]], dtype=torch.float64)
    return rotate(x, *cos_sin(positions, rotary_frequencies(len(vector), theta))).flatten()


def near(actual: torch.Tensor, expected: list[float], tolerance: float = 1e-12) -> bool:
    return torch.allclose(actual, torch.tensor(expected, dtype=actual.dtype), rtol=0, atol=tolerance)


def test_exercise_1():
    assert near(turned([3, 4], 1, theta=100), [-1.74497702, 4.68562218], tolerance=5e-9)


def test_exercises_2_and_3_the_score_depends_on_the_distance_only():
    q, k = turned([1, 0], math.pi / 2, 100), turned([0, 2], math.pi, 100)
    assert near(q, [0, 1]) and near(k, [0, -2])
    q_shifted, k_shifted = turned([1, 0], 0, 100), turned([0, 2], math.pi / 2, 100)
    assert near(q_shifted, [1, 0]) and near(k_shifted, [-2, 0])
    assert near(q @ k, -2) and near(q_shifted @ k_shifted, -2)


def test_exercises_4_and_5():
    assert near(rotary_frequencies(4, 4), [1, 0.5])
    q, k = turned([1, 1, 2, 0], math.pi, theta=4), turned([1, 0, 0, 1], 0, theta=4)
    assert near(q, [-1, -1, 0, 2]) and near(k, [1, 0, 0, 1])
    assert near(q @ k, 1)


def test_exponent_is_not_doubled():
    assert near(rotary_frequencies(8, 1e4), [1, 0.1, 0.01, 0.001])


GOLDEN_SCALED = {
    (128, 8): {29: 2.16657076e-3, 32: 5.24846161e-4, 34: 1.78507813e-4, 63: 3.06892599e-7},
    (64, 32): {15: 1.29054793e-3, 16: 4.29556797e-4, 17: 9.70828780e-5, 31: 9.41830673e-8},
    (128, 32): {32: 4.29556797e-4, 63: 7.67231497e-8},
}
GOLDEN_PLAIN = {
    128: {29: 2.61609925e-3, 32: 1.41421356e-3, 34: 9.38473870e-4, 63: 2.45514079e-6},
    64: {15: 2.13111954e-3, 16: 1.41421356e-3, 17: 9.38473870e-4, 31: 3.01385815e-6},
}


@pytest.mark.parametrize(("head_dim", "factor"), GOLDEN_SCALED)
def test_scaled_frequencies(head_dim, factor):
    frequencies = rotary_frequencies(head_dim, 5e5, RopeScaling(factor=factor))
    for index, value in GOLDEN_SCALED[head_dim, factor].items():
        assert frequencies[index].item() == pytest.approx(value, rel=5e-9)


@pytest.mark.parametrize("head_dim", GOLDEN_PLAIN)
def test_plain_frequencies(head_dim):
    frequencies = rotary_frequencies(head_dim, 5e5)
    for index, value in GOLDEN_PLAIN[head_dim].items():
        assert frequencies[index].item() == pytest.approx(value, rel=5e-9)


@pytest.mark.parametrize(("head_dim", "factor", "bands"), [
    (128, 8, (29, 6, 29)), (64, 32, (15, 3, 14)), (128, 32, (29, 6, 29))])
def test_scaling_has_three_bands(head_dim, factor, bands):
    ratio = rotary_frequencies(head_dim, 5e5) / rotary_frequencies(head_dim, 5e5, RopeScaling(factor=factor))
    kept, divided = (
        (ratio == 1).sum().item(),
        torch.isclose(ratio, torch.tensor(factor, dtype=ratio.dtype)).sum().item(),
    )
    assert (kept, head_dim // 2 - kept - divided, divided) == bands


def test_presets_of_3_2_stretch_by_32():
    scaling = {name: config.rope_scaling for name, config in PRESETS.items()}
    assert scaling["llama3.2_1b"].factor == scaling["llama3.2_3b"].factor == 32
    assert scaling["llama3.1_8b"].factor == 8
    assert scaling["llama3_8b"] is None


def test_equals_the_block_diagonal_matrix():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 5, 2, 8, generator=generator, dtype=torch.float64)
    frequencies = rotary_frequencies(8, 1e4)
    result = rotate(x, *cos_sin(torch.arange(5)[None], frequencies))
    for position in range(5):
        blocks = [
            torch.tensor([[math.cos(a), -math.sin(a)], [math.sin(a), math.cos(a)]], dtype=torch.float64)
            for a in (position * frequencies).tolist()
        ]
        expected = x[0, position] @ torch.block_diag(*blocks).T
        assert torch.allclose(result[0, position], expected, rtol=0, atol=1e-13)


@settings(max_examples=50, deadline=None)
@given(m=st.floats(0, 1000), n=st.floats(0, 1000), shift=st.floats(0, 1000), seed=st.integers(0, 10_000))
def test_scores_depend_on_the_distance_and_equal_the_complex_form(m, n, shift, seed):
    q, k = torch.randn(2, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).tolist()
    score = turned(q, m, 1e4) @ turned(k, n, 1e4)
    shifted = turned(q, m + shift, 1e4) @ turned(k, n + shift, 1e4)
    assert score.item() == pytest.approx(shifted.item(), abs=1e-9)
    pairs_q, pairs_k = (
        torch.view_as_complex(torch.tensor(x, dtype=torch.float64).view(-1, 2)) for x in (q, k)
    )
    turns = torch.polar(torch.ones(4, dtype=torch.float64), (m - n) * rotary_frequencies(8, 1e4))
    assert score.item() == pytest.approx((pairs_q * pairs_k.conj() * turns).real.sum().item(), abs=1e-9)


def test_dtypes_in_and_out():
    table = RotaryTable(ModelConfig(dim=32, heads=2, context_length=64))
    positions = torch.arange(64)[None]
    x = torch.randn(1, 64, 2, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    exact = table.at(positions, torch.float64)(x)
    single = table.at(positions, torch.float32)
    assert single.cos.dtype == torch.float32
    assert single(x.float()).dtype == torch.float32
    assert torch.allclose(single(x.float()).double(), exact, rtol=0, atol=2e-6)
    # In bfloat16 only the input and the result are rounded, not the arithmetic between.
    half = x.bfloat16()
    assert torch.equal(single(half), single(half.float()).bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_complex_product_equals_the_real_formula(dtype):
    table = RotaryTable(ModelConfig(dim=32, heads=2, context_length=64))
    rotation = table.at(torch.arange(64)[None], torch.promote_types(dtype, torch.float32))
    wide = torch.randn(3, 64, 4, 17, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    upstream = torch.randn(3, 64, 4, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    tolerance = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 2**-6}[dtype]
    for x in (wide[..., :16].contiguous(), wide[..., 1:], wide[..., :16].transpose(1, 2).contiguous().transpose(1, 2)):
        x = x.detach().requires_grad_()
        turned, formula = rotation(x), rotate(x, rotation.cos, rotation.sin)
        assert turned.dtype == dtype and turned.shape == x.shape
        assert torch.allclose(turned, formula, rtol=0, atol=tolerance)
        gradients = [torch.autograd.grad(out, x, upstream)[0] for out in (turned, formula)]
        assert torch.allclose(*gradients, rtol=0, atol=2 * tolerance)


def test_compiled_rotation_is_real_and_equal():
    rotation = RotaryTable(ModelConfig(dim=32, heads=2, context_length=8)).at(torch.arange(8)[None], torch.float32)
    graphs: list[str] = []

    def record(graph, inputs):
        graphs.append(str(graph.graph))
        return graph

    x = torch.randn(1, 8, 2, 16, generator=torch.Generator().manual_seed(0))
    compiled = torch.compile(lambda x: rotation(x), backend=record, fullgraph=True)
    assert torch.allclose(compiled(x), rotation(x), rtol=0, atol=1e-6)
    assert len(graphs) == 1 and "complex" not in graphs[0]


def test_restarted_positions_pick_the_same_rows():
    table = RotaryTable(ModelConfig(dim=32, heads=2, context_length=8))
    rotation = table.at(torch.tensor([[0, 1, 2, 0, 1]]), torch.float32)
    assert torch.equal(rotation.cos[0, 3:], rotation.cos[0, :2])
    assert not torch.equal(rotation.cos[0, 1], rotation.cos[0, 2])


def test_positions_beyond_the_context_are_an_error():
    with pytest.raises(IndexError):
        RotaryTable(ModelConfig(context_length=8)).at(torch.tensor([[8]]), torch.float32)


def test_table_made_in_inference_mode_can_train():
    table = RotaryTable(ModelConfig(dim=32, heads=2, context_length=8))
    positions = torch.arange(8)[None]
    with torch.inference_mode():
        table.at(positions, torch.float32)
    x = torch.randn(1, 8, 2, 16, requires_grad=True)
    table.at(positions, torch.float32)(x).sum().backward()
    assert x.grad is not None
