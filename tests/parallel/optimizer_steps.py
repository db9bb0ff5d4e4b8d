"""What every rank does where optimizers are compared: steps, rejected ones, given gradients; saving and loading."""

from pathlib import Path

import numpy as np
import torch

from drover.pipeline.formats.sharded_tensors import CheckpointReader
from drover.pipeline.parallel.grid import own
from tests.faulty import Scale
from tests.parallel.train_steps import nothing, train_steps, whole


def optimizer_steps(ranks, first=0, rejected=(), given=False, load=None, train=None, **settings):
    """`train_steps` from step `first` on, by a schedule of ten steps.

    rejected: steps whose loss is no number, so that gradients are not either. given: gradients are replaced by ones
    that are made up whole, the same under every layout. load: the folder of a checkpoint to start from.

    Returns, on rank 0: `results`, (loss, norm, applied) of each step; `state`, whole tensors by name as in a
    checkpoint; `held`, whether weights and states were the same to the last bit, on all ranks, after each rejected
    step.
    """
    results, held, engines, scales, copies = [], [], [], [], {}

    def built(engine):
        engines.append(engine)
        scales.append(Scale(engine))
        if load:
            with CheckpointReader(Path(load)) as reader:
                engine.load(reader, first)

    def before(engine, step):
        scales[0].factor = float("nan") if step in rejected else 1.0
        engine.proven = engine.proven or step in rejected
        copies.update(copied(engine))

    def after(engine, step, result):
        results.append([result.loss, result.grad_norm, result.applied])
        if step in rejected:
            held.append(ranks.sum(any(not torch.equal(copies[key], now) for key, now in copied(engine).items())) == [0])

    train_steps(ranks, first=first, train={"steps": 10, "warmup_steps": 2, **(train or {})}, **settings, built=built,
                before=before, update=give if given else nothing, after=after)
    return {"results": results, "state": whole(ranks, engines[0].state_shards()), "held": held}


def copied(engine):
    """This rank's weights and states, as they are now."""
    return {(name, number): piece.tensor.detach().clone() for name, pieces in engine.state_shards().items()
            for number, piece in enumerate(pieces)}


@torch.no_grad()
def give(engine, step):
    """Replace this rank's gradients by its part of made-up ones."""
    for number, (name, parameter) in enumerate(engine.model.named_parameters()):
        made_up = np.random.default_rng([step, number]).standard_normal(tuple(parameter.shape))
        place = engine.parts[name]
        cut = made_up[tuple(slice(a, a + n) for a, n in zip(place.offset, place.size, strict=True))]
        own(parameter.grad).copy_(torch.from_numpy(cut))
