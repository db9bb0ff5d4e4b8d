"""The decoder as a whole: its shape and problems, losses, refusals, initial values. What it computes is compared with
transformers (tests/formats) and with documents alone (test_backends); published numbers: tests/test_seed_facts.py."""

import pytest
import torch
import yaml

from drover.model import llama
from drover.model.attention.module import KeyValueCache
from drover.model.config import ModelConfig
from drover.model.llama import Llama, initial_value
from tests.model.test_backends import CONFIG
from tests.refusal import refused, table
from tests.tiny_models import opinionated


def random_tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(50, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("changes", [{"head_dim": 16}, {"tied_embeddings": True}])
def test_the_shape_counts_what_the_network_has(changes):
    """Its names are held by tests/test_released.py, which reads weights of earlier versions."""
    config = CONFIG.model_copy(update=changes)
    model = Llama(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == config.parameter_count
    assert list(model.buffers()) == []


def test_refusals():
    refused(ValueError, "33 tokens; context_length is 32", opinionated(CONFIG), random_tokens(1, 33))
    for wrong in ({"labels": random_tokens(1, 4)}, {"documents": random_tokens(1, 4)}, {"caches": [KeyValueCache(9)]}):
        with pytest.raises(AssertionError):
            opinionated(CONFIG)(random_tokens(1, 5), **wrong)
    refused(ValueError, r"dim \(100\).*kv_heads \(3\).*vocab_size is None", Llama,
            ModelConfig(dim=100, heads=8, kv_heads=3))


PROBLEMS = """
{dim: 100, heads: 8, head_dim: 12} -> dim (100) must be divisible by heads (8)
{dim: 24, heads: 8} -> 24 / 8 = 3) must be even
{layers: 0, kv_heads: -1, norm_eps: 0.0, vocab_size: 0} -> layers must be above 0, not 0; kv_heads must be above 0, \
not -1; norm_eps must; vocab_size must
{ffn_dim: 512, ffn_dim_multiplier: 1.3} -> ffn_dim (512) and ffn_dim_multiplier (1.3)
{context_length: 16384, rope_scaling: {factor: 0.5, low_freq_factor: 0, high_freq_factor: 0, original_context_length: \
0}} -> low_freq_factor must be above 0; high_freq_factor (0.0) must be above; factor must be at least 1, not 0.5; \
original_context_length must be above 0
{context_length: 64, rope_scaling: {factor: 1, original_context_length: 64}} -> original_context_length (64) must be \
below context_length (64)
"""


@pytest.mark.parametrize(("changes", "sentences"), table(PROBLEMS, yaml.safe_load))
def test_problems_are_sentences_with_numbers(changes, sentences):
    for problem, sentence in zip(ModelConfig(**changes).problems(), sentences.split("; "), strict=True):
        assert sentence in problem


SHAPE = ModelConfig(dim=128, layers=8, heads=4, kv_heads=2, vocab_size=500)


@pytest.mark.parametrize(("name", "deviation"), [
    ("tok_embeddings", 0.02), ("layers.3.attention.wq", 0.02), ("layers.3.attention.wo", 0.02 / 4),
    ("output", 128**-0.5)])
def test_initial_values_have_the_documented_spread(name, deviation):
    value = initial_value(f"{name}.weight", (500, 200), SHAPE, seed=0)
    assert value.dtype == torch.float32
    assert 2.9 * deviation < value.abs().max() <= 3 * deviation
    assert abs(value.mean().item()) < 0.02 * deviation
    # Cutting a normal at 3 standard deviations leaves 0.98658 of its own.
    assert value.std().item() == pytest.approx(0.98658 * deviation, rel=0.01)


def test_initial_norms_are_one_and_unknown_names_are_refused():
    assert torch.equal(initial_value("layers.1.attention_norm.weight", (128,), SHAPE, 0), torch.ones(128))
    refused(ValueError, "wz", initial_value, "layers.0.attention.wz.weight", (2, 2), SHAPE, 0)


def test_initial_values_are_fixed_across_processes_and_releases_and_touch_nothing_global():
    """A changed stream would silently change every published run that names only its seed."""
    torch.manual_seed(123)
    state = torch.get_rng_state()
    with torch.device("meta"):
        value = initial_value("tok_embeddings.weight", (1, 4), SHAPE, 1)
    known = torch.tensor([[0.0200762, 0.00689631, -0.0295555, 0.0167283]])
    assert torch.allclose(value, known, rtol=1e-4, atol=0)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("workers", "chunk"), [(1, 7), (3, 16), (3, 2**14)])
def test_any_rows_are_those_of_all(monkeypatch, workers, chunk):
    """However many are drawn at a time, and by however many threads. Each block of rows has a seed of its own."""
    monkeypatch.setattr(llama, "BLOCK_VALUES", 40)
    whole = initial_value("layers.1.attention.wo.weight", (23, 8), SHAPE, 3)
    assert len(whole.unique()) == whole.numel()
    known = torch.tensor([-0.00247352, 0.00327289, -0.000233349])  # the second block begins with these
    assert torch.allclose(whole[5, :3], known, rtol=1e-4, atol=0)
    monkeypatch.setattr(llama, "CHUNK_VALUES", chunk)
    for start, stop in ((0, 23), (2, 21), (6, 8), (11, 11), (22, 23)):
        result = initial_value("layers.1.attention.wo.weight", (23, 8), SHAPE, 3, range(start, stop), workers)
        assert torch.equal(result, whole[start:stop])
