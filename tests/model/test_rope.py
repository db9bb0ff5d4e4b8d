"""Rotary embedding: two ways to turn, dtypes. tests/test_seed_facts.py has golden values, and tests/formats compares it
with transformers."""

import pytest
import torch

from drover.model.config import ModelConfig
from drover.model.rope import RotaryTable, rotate
from tests.model.agreement import agree

TABLE = RotaryTable(ModelConfig(dim=32, heads=2, context_length=64))
POSITIONS = torch.arange(64)[None]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_in_bfloat16_only_input_and_result_are_rounded():
    single, x = TABLE.at(POSITIONS, torch.float32), random(1, 64, 2, 16)
    assert single.cos.dtype == torch.float32 == single(x.float()).dtype
    assert torch.allclose(single(x.float()).double(), TABLE.at(POSITIONS, torch.float64)(x), rtol=0, atol=2e-6)
    half = x.bfloat16()
    assert torch.equal(single(half), single(half.float()).bfloat16())


@pytest.mark.parametrize(("dtype", "tolerance"), [
    (torch.float32, 1e-6), (torch.float64, 1e-14), (torch.bfloat16, 2**-6)])
def test_complex_product_equals_the_real_formula(dtype, tolerance):
    rotation = TABLE.at(POSITIONS, torch.promote_types(dtype, torch.float32))
    wide = random(3, 64, 4, 17).to(dtype)
    for x in (wide[..., :16].contiguous(), wide[..., 1:], wide[..., :16].transpose(1, 2).contiguous().transpose(1, 2)):
        x = x.detach().requires_grad_()
        agree(rotation(x), rotate(x, rotation.cos, rotation.sin), [x], value=tolerance, gradient=2 * tolerance)


def test_no_position_is_beyond_the_context():
    with pytest.raises(IndexError):
        TABLE.at(torch.tensor([[64]]), torch.float32)


def test_table_made_in_inference_mode_can_train():
    table = RotaryTable(TABLE.config)
    with torch.inference_mode():
        table.at(POSITIONS, torch.float32)
    x = random(1, 64, 2, 16).requires_grad_()
    table.at(POSITIONS, torch.float32)(x).sum().backward()
    assert x.grad is not None
