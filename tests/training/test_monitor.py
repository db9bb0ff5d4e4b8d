"""What fp8 does to the values of a layer is counted as it happens."""

import pytest
import torch

from drover.pipeline.parallel.grid import own
from drover.pipeline.training.device import compiled_graphs
from drover.pipeline.training.guards import StepLimits
from drover.pipeline.training.monitor import FACTORS, Fp8Watch, fp8_curves
from tests.training.engine_kit import batch_of, engine_of

pytest.importorskip("torchao", reason="torchao is not installed, which fp8 needs: pip install --editable '.[fp8]'")

CPU = torch.device("cpu")
LARGE = 125 * 2.0**10
"""A value that bfloat16 and four digits hold, two million times the size of a first weight."""


def built(ranks, **train):
    return engine_of(ranks, torch.bfloat16, precision="fp8", **train), batch_of()


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp", "tensorwise"])
def test_largest_values_and_shares_of_zeros_are_those_of_the_layer(ranks, recipe):
    """One row is given a value that nothing else of it can stand beside."""
    engine, batch = built(ranks, fp8_recipe=recipe)
    clean = Fp8Watch(engine, CPU).measure(batch, batch.targets)
    name = "layers.0.attention.wv"
    weight = own(engine.model.layers[0].attention.wv.weight.detach())
    assert clean[name]["weight"] == (pytest.approx(float(weight.abs().max()), rel=4e-3), 0)
    weight[0, 0] = LARGE
    result = Fp8Watch(engine, CPU).measure(batch, batch.targets)
    lost = weight.shape[1] - 1 if recipe == "rowwise" else weight.numel() - 1  # the others scale the whole once
    assert result[name]["weight"] == (LARGE, pytest.approx(lost / weight.numel(), rel=1e-3))
    assert result["layers.1.feed_forward.w1"]["weight"] == clean["layers.1.feed_forward.w1"]["weight"]
    assert min(figures["gradient"][0] for figures in result.values()) > 0


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
def test_compiled_and_checkpointed_blocks_are_looked_at_too_and_stay_compiled(ranks, monkeypatch, checkpointing):
    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **_: compiler(function, backend="aot_eager"))
    plain, batch = built(ranks)
    engine, _ = built(ranks, compile=True, activation_checkpointing=checkpointing)
    expected = Fp8Watch(plain, CPU).measure(batch, batch.targets)

    def step():
        return engine.step(batch.split(2), 2, batch.targets, 0.0, StepLimits())
    first = step()
    graphs = compiled_graphs()
    watch = Fp8Watch(engine, CPU)
    assert graphs and watch.measure(batch, batch.targets) == expected
    assert step() == first and compiled_graphs() == graphs
    assert all(parameter.grad is None for parameter in engine.model.parameters())


def test_what_is_no_number_is_told_as_text():
    figures = {"input": ("nan", 0.0), "weight": (1.0, 0.0), "gradient": ("inf", 0.5)}
    others = dict.fromkeys(FACTORS, (2.0, 0.1))
    seen = fp8_curves({"layers.0.attention.wq": figures, "layers.0.attention.wk": others})
    assert seen["fp8_gradient_amax"] == "inf" and seen["fp8_gradient_zeros"] == 0.5
    assert seen["fp8_weight_amax"] == 2.0 and seen["fp8_weight_amax_smallest"] == 1.0
