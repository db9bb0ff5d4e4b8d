"""Initial weights: a pure function of name and seed, with the documented spread."""


import pytest
import torch

from drover.model import llama
from drover.model.config import ModelConfig
from drover.model.llama import initial_value
from tests.refusal import refused

CONFIG = ModelConfig(dim=128, layers=8, heads=4, kv_heads=2, vocab_size=500)
TIED = CONFIG.model_copy(update={"tied_embeddings": True})


@pytest.mark.parametrize(("names", "deviation"), [
    (("tok_embeddings", "layers.3.attention.wq", "layers.3.feed_forward.w3"), 0.02),
    (("layers.3.attention.wo", "layers.0.feed_forward.w2"), 0.02 / 4), (("output",), 128**-0.5)])
def test_spread(names, deviation):
    for name in names:
        value = initial_value(f"{name}.weight", (500, 200), CONFIG, seed=0)
        assert value.dtype == torch.float32
        assert 2.9 * deviation < value.abs().max() <= 3 * deviation
        assert abs(value.mean().item()) < 0.02 * deviation
        # Cutting a normal at 3 standard deviations leaves 0.98658 of its own.
        assert value.std().item() == pytest.approx(0.98658 * deviation, rel=0.01)


def test_norms_are_one_and_unknown_names_are_refused():
    for name in ("norm", "layers.1.attention_norm", "layers.1.ffn_norm", "layers.1.attention.q_norm"):
        assert torch.equal(initial_value(f"{name}.weight", (128,), CONFIG, 0), torch.ones(128))
    refused(ValueError, "wz", initial_value, "layers.0.attention.wz.weight", (2, 2), CONFIG, 0)


def test_depends_on_nothing_global_and_touches_nothing():
    value = initial_value("layers.0.attention.wq.weight", (16, 16), CONFIG, 7)
    torch.manual_seed(123)
    state = torch.get_rng_state()
    with torch.device("meta"):
        assert torch.equal(initial_value("layers.0.attention.wq.weight", (16, 16), CONFIG, 7), value)
    assert torch.equal(torch.get_rng_state(), state)


def test_value_is_fixed_across_processes_and_releases():
    # A changed stream would silently change every published run that names only its seed.
    value = initial_value("tok_embeddings.weight", (1, 4), CONFIG, 1)
    assert torch.allclose(
        value, torch.tensor([[0.0200762, 0.00689631, -0.0295555, 0.0167283]]), rtol=1e-4, atol=0
    )


@pytest.mark.parametrize(("workers", "chunk"), [(1, 7), (3, 16), (3, 2**14)])
def test_any_rows_are_those_of_the_whole(monkeypatch, workers, chunk):
    """However many are drawn at a time, and by however many threads. Each block of rows has a seed of its own."""
    monkeypatch.setattr(llama, "BLOCK_VALUES", 40)
    whole = initial_value("layers.1.attention.wo.weight", (23, 8), CONFIG, 3)
    assert len(whole.unique()) == whole.numel()
    known = torch.tensor([-0.00247352, 0.00327289, -0.000233349])  # the second block begins with these
    assert torch.allclose(whole[5, :3], known, rtol=1e-4, atol=0)
    monkeypatch.setattr(llama, "CHUNK_VALUES", chunk)
    for start, stop in ((0, 23), (2, 21), (6, 8), (11, 11), (22, 23)):
        result = initial_value("layers.1.attention.wo.weight", (23, 8), CONFIG, 3, range(start, stop), workers)
        assert torch.equal(result, whole[start:stop])


def test_tied_output_is_the_embedding():
    embedding = initial_value("tok_embeddings.weight", (5, 128), TIED, 1)
    assert torch.equal(initial_value("output.weight", (5, 128), TIED, 1), embedding)
    assert not torch.equal(initial_value("output.weight", (5, 128), CONFIG, 1), embedding)
