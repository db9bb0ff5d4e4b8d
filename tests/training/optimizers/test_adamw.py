"""Which parameters decay, and that a step is AdamW's formula."""

import torch

from drover.pipeline.training.optimizers import decays
from tests.training.optimizers.kit import built, give, model_of, step


def names_that_decay(tied):
    return {name for name, _ in model_of(tied=tied).named_parameters() if decays(name, tied)}


def test_norms_and_embeddings_do_not_decay():
    matrices = {f"layers.{layer}.{name}.weight" for layer in range(2) for name in
                ("attention.wq", "attention.wk", "attention.wv", "attention.wo", "feed_forward.w1", "feed_forward.w2",
                 "feed_forward.w3")}
    assert names_that_decay(tied=False) == matrices | {"output.weight"}
    assert names_that_decay(tied=True) == matrices


def test_a_step_is_decoupled_weight_decay_plus_adam():
    model = model_of()
    optimizer = built(model, weight_decay=0.5, eps=1e-8)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    give(model, value=1.0)
    step(optimizer)
    for name, parameter in model.named_parameters():
        kept = 1 - 0.01 * 0.5 if decays(name, tied=False) else 1.0
        # On the first step both bias-corrected moments are 1, so the update is lr / (1 + eps).
        torch.testing.assert_close(parameter.detach(), before[name] * kept - 0.01, rtol=1e-5, atol=1e-6)
