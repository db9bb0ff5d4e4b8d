"""The engine in one process: without FSDP2 where that has nothing to do, what a model gets, that all of it learns."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from drover.pipeline.core.console import readable
from drover.pipeline.core.errors import UserError
from drover.pipeline.data.sampling.batch import pack
from drover.pipeline.parallel import fsdp
from drover.pipeline.rehearsal.watch import Watch
from drover.pipeline.training.device import memory_explained
from drover.pipeline.training.engine import Engine, without_gradient
from drover.pipeline.training.guards import StepLimits
from tests.training.engine_kit import MODEL, batch_of, engine_of


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


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_step_queues_its_work_without_reading_from_the_device(ranks, monkeypatch, optimizer):
    """Whatever the device decides: the host learns it from the result."""
    engine = engine_of(ranks, torch.float32, optimizer=optimizer)
    engine.proven = True  # the first step of a start reads gradients
    for limits in (StepLimits(), StepLimits(loss=0.0)):
        parts, targets = list(batch_of().split(2)), torch.tensor(120.0, dtype=torch.float64)
        with Watch((64, 32)) as watch, monkeypatch.context() as patch:
            for name in ("tolist", "cpu", "numpy"):
                patch.setattr(torch.Tensor, name, lambda *_, name=name: watch.waits.update([name]))
            engine.compute(iter(parts), 2, targets)
            engine.update(1e-2, limits)
        assert not watch.waits and engine.result().applied == (limits == StepLimits())
    assert engine.updates == 1


def test_want_of_memory_within_a_forward_pass_names_the_largest_modules(ranks):
    """In the second of two micro-batches, when the first has left gradients and FSDP2 may have gathered weights."""
    engine, _, _ = train(ranks, torch.bfloat16)
    assert isinstance(engine.model, FSDPModule), "mixed precision needs it"
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
          memory_explained(engine, ranks, 4, "c.yaml", first=True)):
        engine.step(batch.split(2), 2, batch.targets, 1e-2, StepLimits())


def test_documents_are_kept_apart_unless_asked_otherwise():
    """By lengths that the loader knows: nobody waits for a GPU to find where documents begin."""
    batch = pack([(np.arange(33), np.array([0, 11, 20])), (np.arange(33), np.array([5]))])
    apart, across = (Engine.inputs(SimpleNamespace(across_documents=requested, proven=True), batch)
                     for requested in (False, True))
    assert apart["documents"] is batch.documents and apart["positions"] is batch.positions
    assert apart["document_lengths"] == [11, 9, 12, 5, 27] and across.keys() == {"tokens", "labels"}
    for given in (apart, across):
        assert given["tokens"] is batch.tokens and given["labels"] is batch.labels


SCORES = QUERY, KEY = [f"layers.0.attention.{name}.weight" for name in ("wq", "wk")]
"""What decides who attends to whom, and nothing else."""


@pytest.mark.parametrize(("counts", "attending", "message"), [
    ([5, 1, 2, 3], True, ""), ([5, 0, 0, 3], False, ""),  # every target's token sees itself only
    ([5, 0, 0, 3], True, f": {QUERY}, {KEY}, of 4 parameters, got no gradient"),
    ([0, 0, 0, 3], False, ": tok_embeddings.weight, of 4"), ([0] * 4, True, f"{KEY} and 1 more, of 4")])
def test_parameters_without_a_gradient_are_named_and_scores_that_nothing_is_seen_by_are_not(counts, attending, message):
    result = without_gradient(["tok_embeddings.weight", *SCORES, "norm.weight"], counts, attending)
    assert message in result and bool(message) == bool(result)
