"""muP against a formulation of its own: a factor on the logits, and rates by hand; and what it is for."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from drover.model.config import ModelConfig
from drover.model.llama import Llama
from drover.pipeline.config.training import ParallelConfig, TrainConfig
from drover.pipeline.config.tree import Config
from drover.pipeline.parallel.fsdp import drawn, fill
from drover.pipeline.parallel.grid import Grid
from drover.pipeline.parallel.ranks import Ranks
from drover.pipeline.training.mup import scaled
from drover.pipeline.training.optimizers import build_optimizer
from tests.training.optimizer_kit import step

BASE = 32
GRID = Grid(Ranks(0, 1, torch.device("cpu")), ParallelConfig())


def made(width, mup=True, tied=False, **train):
    """A model in float64 with its initial values, and its configuration."""
    shape = ModelConfig(dim=width, layers=2, heads=width // 16, kv_heads=width // 32, ffn_dim=3 * width, vocab_size=64,
                        context_length=32, tied_embeddings=tied)
    config = Config(model=shape, train=TrainConfig(mup_base_width=BASE if mup else None, **train))
    model = Llama(shape).double()
    fill(model, scaled(drawn(shape, 0), config), GRID)
    return model, config


def batch(number):
    tokens = torch.randint(64, (4, 33), generator=torch.Generator().manual_seed(number))
    return tokens[:, :-1], tokens[:, 1:]


@pytest.mark.parametrize("tied", [False, True])
def test_it_is_a_factor_on_the_logits_and_rates_by_width(tied):
    """To rounding, over five steps of AdamW with decay: four times the width of the base."""
    model, config = made(4 * BASE, tied=tied, lr=0.01, weight_decay=0.1, eps=1e-30)
    usual, _ = made(4 * BASE, mup=False, tied=tied)
    own = Llama(usual.config).double()
    own.load_state_dict({name: value / 2 if name.startswith("layers.") and value.dim() == 2 else
                         2 * value if name == "output.weight" and not tied else value
                         for name, value in usual.state_dict().items()})
    rates = {name: (0.01 / 4, 0.4) if name.startswith("layers.") and value.dim() == 2 else
             (0.01, 0.1 if name == "output.weight" else 0.0) for name, value in own.named_parameters()}
    theirs = torch.optim.AdamW([{"params": [own.get_parameter(name)], "lr": lr, "weight_decay": decay}
                                for name, (lr, decay) in rates.items()], betas=(0.9, 0.95), eps=1e-30)
    optimizer = build_optimizer(model, config, GRID, tied)
    for number in range(5):
        tokens, labels = batch(number)
        for each, logits in ((model, model(tokens)), (own, own(tokens) / 4)):
            each.zero_grad()
            cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
        step(optimizer, lr=0.01)
        theirs.step()
    tokens, _ = batch(9)
    torch.testing.assert_close(model(tokens), own(tokens) / 4, rtol=1e-9, atol=1e-9)
    assert (model.norm.weight < 0.5).all(), "the factor is in the weights: the export needs no other"


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_same_rate_moves_activations_alike_at_every_width(optimizer):
    """The coordinate check of Yang et al.: by updates of one size, activations before the last norm move as far in a
    model of eight times the width. Without muP they move several times as far."""
    def moved(width, mup):
        model, config = made(width, mup, optimizer=optimizer, lr=0.01, weight_decay=0.0)
        seen = []
        model.norm.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].detach()))
        tokens, labels = batch(0)
        model(tokens)
        updates = build_optimizer(model, config, GRID, False)
        for _ in range(4):
            model.zero_grad()
            model(tokens, labels).backward()
            step(updates, lr=0.01)
        model(tokens)
        return float((seen[-1] - seen[0]).square().mean().sqrt())
    narrow = moved(BASE, mup=True)
    assert 0.9 < moved(8 * BASE, mup=True) / narrow < 1.1
    assert moved(8 * BASE, mup=False) / narrow > 2
