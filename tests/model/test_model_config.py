"""The config's arithmetic, and its list of problems. tests/test_seed_facts.py has published numbers."""

import pydantic
import pytest
import yaml

from drover.model.config import ModelConfig
from tests.model.test_backends import CONFIG
from tests.refusal import table


def test_tied_matrix_counts_once_but_multiplies():
    tied, untied = (ModelConfig(vocab_size=1000, tied_embeddings=tied) for tied in (True, False))
    assert untied.parameter_count - tied.parameter_count == 1000 * 256
    assert untied.matmul_parameter_count == tied.matmul_parameter_count
    assert untied.non_embedding_parameter_count == tied.non_embedding_parameter_count


def test_causal_halves_only_attention():
    config = ModelConfig(dim=288, layers=6, heads=6, kv_heads=2, ffn_dim=768, vocab_size=8192)
    matmul = 6 * (6 * (2 * 288 * 288 + 2 * 288 * 96 + 3 * 288 * 768) + 8192 * 288)
    assert config.flops_per_token(256, causal=True) == matmul + 6 * 6 * 288 * 256


def test_a_window_takes_from_attentions_operations():
    plain, windowed = (CONFIG.model_copy(update={"layers": 4, **changes}) for changes in (
        {}, {"sliding_window": 8, "full_attention_interval": 4}))
    for causal, full, part in ((False, 32.0, 8.0), (True, 16.0, 7.0)):  # causal: 8 - 8 * 8 / 64
        assert plain.flops_per_token(32, causal) - windowed.flops_per_token(32, causal) == 12 * 48 * 3 * (full - part)
        assert plain.flops_per_token(8, causal) == windowed.flops_per_token(8, causal)


PROBLEMS = """
{dim: 100, heads: 8} -> dim (100) must be divisible by heads (8)
{heads: 8, kv_heads: 3} -> heads (8) must be divisible by kv_heads (3)
{dim: 24, heads: 8} -> 24 / 8 = 3) must be even
{layers: 0, kv_heads: -1, norm_eps: 0.0, vocab_size: 0} -> layers must be above 0, not 0; kv_heads must be above 0, \
not -1; norm_eps must; vocab_size must
{ffn_dim: 512, ffn_dim_multiplier: 1.3} -> ffn_dim (512) and ffn_dim_multiplier (1.3)
{context_length: 16384, rope_scaling: {factor: 0.5, low_freq_factor: 0, high_freq_factor: 0, original_context_length: \
0}} -> low_freq_factor must be above 0; high_freq_factor (0.0) must be above; factor must be at least 1, not 0.5; \
original_context_length must be above 0
{context_length: 64, rope_scaling: {factor: 1, original_context_length: 64}} -> original_context_length (64) must be \
below context_length (64)
{heads: 0, kv_heads: 0, dim: 0} -> dim must; heads must; kv_heads must
{sliding_window: 1} -> sliding_window must be at least 2, not 1
{full_attention_interval: 2} -> full_attention_interval (2) selects layers that see beyond a sliding_window
{sliding_window: 8, full_attention_interval: 1} -> full_attention_interval (1) lets every layer see all
{no_rope_layer_interval: 0} -> no_rope_layer_interval must be above 0, not 0
"""


@pytest.mark.parametrize(("changes", "sentences"), table(PROBLEMS, yaml.safe_load))
def test_problems_are_sentences_with_numbers(changes, sentences):
    for problem, sentence in zip(ModelConfig(**changes).problems(), sentences.split("; "), strict=True):
        assert sentence in problem


@pytest.mark.parametrize("changes", [{"dmi": 256}, {"dim": "256"}, {"rope_theta": float("nan")}])
def test_wrong_names_and_types_are_refused(changes):
    with pytest.raises(pydantic.ValidationError):
        ModelConfig(**changes)
