"""The decoder as a whole: names, losses, refusals. What it computes is compared with transformers
(tests/formats) and with documents alone (test_backends)."""

import pytest
import torch
import torch.nn.functional as F

from drover.model.attention.module import KeyValueCache
from drover.model.config import ModelConfig
from drover.model.llama import Llama
from tests.model.agreement import agree
from tests.model.test_backends import CONFIG
from tests.refusal import refused
from tests.tiny_models import DESCENDANT, opinionated


def random_tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(50, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("changes", [{}, {"tied_embeddings": True}, DESCENDANT], ids=["untied", "tied", "a descendant"])
def test_the_shape_counts_what_the_network_has(changes):
    """Its names are held by tests/test_released.py, which reads weights of earlier versions."""
    config = CONFIG.model_copy(update=changes)
    model = Llama(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == config.parameter_count
    assert list(model.buffers()) == []


@pytest.mark.parametrize("tied", [False, True])
def test_losses_and_gradients_equal_the_plain_way(tied):
    model = opinionated(CONFIG.model_copy(update={"tied_embeddings": tied})).double().requires_grad_()
    tokens, labels = random_tokens(2, 9), random_tokens(2, 9, seed=1)
    labels[0, :4] = -100
    loss, logits = model(tokens, labels), model(tokens)
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    assert loss.item() == pytest.approx(expected.sum().item(), rel=1e-13)
    agree(loss, expected.sum(), list(model.parameters()), value=1e-11)
    each = model(tokens, labels, reduction="none")
    assert not each.requires_grad and torch.allclose(each.flatten(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("length", "arguments", "message"), [
    (33, {}, "33 tokens; context_length is 32"),
    (5, {"labels": random_tokens(1, 4)}, r"labels is \(1, 4\), tokens is \(1, 5\)"),
    (5, {"documents": random_tokens(1, 4)}, r"documents is \(1, 4\)"),
    (5, {"caches": [KeyValueCache(9)]}, "1 caches for 2 layers"),
    (5, {"caches": [KeyValueCache(9)] * 2, "documents": random_tokens(1, 5)}, "documents and caches exclude"),
    (5, {"labels": random_tokens(1, 5), "last_only": True}, "last_only exclude"),
    (5, {"mask": torch.zeros(1, 1, 5, 5)}, "mask is for caches")])
def test_refusals(length, arguments, message):
    model = opinionated(CONFIG)
    refused(ValueError, message, model, random_tokens(1, length), **arguments)
    assert model(random_tokens(1, 32)).shape == (1, 32, 50)
    refused(ValueError, r"dim \(100\).*kv_heads \(3\).*vocab_size is None", Llama,
            ModelConfig(dim=100, heads=8, kv_heads=3))
