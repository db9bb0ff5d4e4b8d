"""The engine in one process: without FSDP2 where there is nothing for it to do, and equal to the last bit."""

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from drover.pipeline.core.console import readable
from drover.pipeline.core.errors import UserError
from drover.pipeline.parallel import fsdp
from drover.pipeline.training.device import memory_explained
from drover.pipeline.training.guards import StepLimits
from tests.training.engines.kit import MODEL, batch_of, engine_of


def train(ranks, precision=torch.float32, tied=False, **settings):
    """Three steps over two micro-batches each: the engine, losses and norms, all pieces of its state."""
    engine = engine_of(ranks, precision, tied, **settings)
    results = []
    for batch in map(batch_of, range(3)):
        results.append(engine.step(batch.split(2), 2, batch.targets, 1e-2, StepLimits()))
    return engine, results, {name: pieces[0] for name, pieces in engine.state_shards().items()}


@pytest.mark.parametrize(("precision", "tied", "settings"), [
    (torch.float32, False, {}), (torch.float32, True, {"activation_checkpointing": "selective"}),
    (torch.float64, False, {"activation_checkpointing": "full", "clip_norm": 0.1})])
def test_alone_it_is_the_same_with_fsdp2_and_without(ranks, monkeypatch, precision, tied, settings):
    engine, results, pieces = train(ranks, precision, tied, **settings)
    assert not any(isinstance(module, FSDPModule) for module in engine.model.modules())
    monkeypatch.setattr(fsdp, "needs_fsdp2", lambda grid, precision: True)
    wrapped, expected, golden = train(ranks, precision, tied, **settings)
    assert isinstance(wrapped.model, FSDPModule)
    assert results == expected and all(result.applied for result in results)
    assert set(pieces) == set(golden)
    for name, piece in pieces.items():
        assert (piece.offset, piece.shape) == (golden[name].offset, golden[name].shape)
        assert torch.equal(piece.tensor, golden[name].tensor), name


def test_mixed_precision_needs_it(ranks):
    engine, _, pieces = train(ranks, torch.bfloat16)
    assert isinstance(engine.model, FSDPModule)
    assert all(piece.tensor.dtype == torch.float32 for piece in pieces.values())


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_want_of_memory_within_a_forward_pass_names_the_largest_modules(ranks, precision):
    """In the second of two micro-batches, when the first has left gradients and FSDP2 may have gathered weights."""
    engine, _, _ = train(ranks, precision)
    passes = []

    def fail(module, given):
        passes.append(module)
        if len(passes) == 2:
            raise torch.OutOfMemoryError("no room")
    engine.model.layers[1].feed_forward.register_forward_pre_hook(fail)
    batch = batch_of()
    size = 4 * MODEL.parameter_count
    held = f"{readable(size)} of weights, {readable(2 * size)} of optimizer's states, {readable(size)} of gradients"
    with (pytest.raises(UserError, match=rf"{held}.*by module: layers.\*.feed_forward "),
          memory_explained(engine, ranks, 4, "--config c.yaml", first=True)):
        engine.step(batch.split(2), 2, batch.targets, 1e-2, StepLimits())
