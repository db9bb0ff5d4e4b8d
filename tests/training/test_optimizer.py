"""Which parameters decay, and that a step is AdamW's formula."""

import torch

from model.config import ModelConfig
from model.llama import Llama, initialise
from pipeline.config.training import TrainConfig
from pipeline.training.optimizer import build_optimizer, decays


def names_that_decay(tied):
    model = Llama(ModelConfig(dim=32, layers=1, heads=2, kv_heads=1, vocab_size=128, tied_embeddings=tied))
    return {name for name, _ in model.named_parameters() if decays(name, tied)}


def test_norms_and_embeddings_do_not_decay():
    matrices = {f"layers.0.{name}.weight" for name in
                ("attention.wq", "attention.wk", "attention.wv", "attention.wo", "feed_forward.w1", "feed_forward.w2",
                 "feed_forward.w3")}
    assert names_that_decay(tied=False) == matrices | {"output.weight"}
    assert names_that_decay(tied=True) == matrices


def test_a_step_is_decoupled_weight_decay_plus_adam():
    config = ModelConfig(dim=32, layers=1, heads=2, kv_heads=1, vocab_size=128)
    model = Llama(config)
    initialise(model, config, seed=0)
    train = TrainConfig(lr=0.01, weight_decay=0.5, eps=1e-8)
    optimizer = build_optimizer(model, train, tied=False)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        kept = 1 - 0.01 * 0.5 if decays(name, tied=False) else 1.0
        # On the first step both bias-corrected moments are 1, so the update is lr / (1 + eps).
        torch.testing.assert_close(parameter.detach(), before[name] * kept - 0.01, rtol=1e-5, atol=1e-6)
