"""What every rank does where optimizers are compared: steps, rejected ones, given gradients; saving and loading."""

from pathlib import Path

import numpy as np
import torch

from pipeline.config.parallel import ParallelConfig
from pipeline.config.training import TrainConfig
from pipeline.config.tree import Config
from pipeline.data.sampling.batch import pack
from pipeline.formats.shard_index import Index
from pipeline.formats.sharded_tensors import CheckpointReader, TensorShard, write_index, write_part
from pipeline.parallel.grid import Grid, own
from pipeline.parallel.initial_values import drawn
from pipeline.training.engines.build import build_engine
from pipeline.training.guards import StepLimits
from pipeline.training.optimizers.schedule import learning_rate
from pipeline.training.precision import DTYPES
from tests.parallel.train_steps import MODEL, SEQUENCES, whole, windows


def optimizer_steps(ranks, precision="fp64", steps=6, first=0, tied=False, rejected=(), given=False, save=None,
                    load=None, train=None, parallel=None):
    """Train on these ranks from step `first` up to step `steps`.

    rejected: steps whose loss is no number, so that gradients are not either. given: gradients are replaced by ones
    that are made up whole, the same under every layout. save, load: folders of checkpoints, written at the end, read
    at the start.

    Returns, on rank 0: `results`, (loss, norm, applied) of each step; `state`, whole tensors by name as in a
    checkpoint; `held`, whether weights and states were the same to the last bit, on all ranks, after each rejected
    step.
    """
    model, parallel = MODEL.model_copy(update={"tied_embeddings": tied}), ParallelConfig(**parallel or {})
    grid = Grid(ranks, parallel)
    share = SEQUENCES // grid.data_ranks
    config = Config(model=model, parallel=parallel, train=TrainConfig(
        **{"precision": precision, "micro_batch": share, "steps": 10, "lr": 5e-4, "warmup_steps": 2, **(train or {})}))
    engine = build_engine(config, model, grid, DTYPES[precision], 1, None if load else drawn(model, 0))
    if load:
        with CheckpointReader(Path(load)) as reader:
            engine.load(reader, first)
    results, held = [], []
    for step in range(first, steps):
        every = windows(step)
        batch = pack(every[grid.data_rank * share:(grid.data_rank + 1) * share])
        engine.loss_factor = float("nan") if step in rejected else 1.0
        engine.proven = engine.proven or step in rejected
        engine.before_update = (lambda step=step: give(engine, step)) if given else lambda: None
        before = copied(engine)
        result = engine.step(batch.split(share), 1, pack(every).targets, learning_rate(step, config.train),
                             StepLimits())
        results.append([result.loss, result.grad_norm, result.applied])
        if step in rejected:
            after = copied(engine)
            held.append(ranks.sum(not all(torch.equal(before[key], after[key]) for key in before)) == [0.0])
    if save:
        store(ranks, engine, Path(save))
    return {"results": results, "state": whole(ranks, engine.state_shards()), "held": held}


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


def store(ranks, engine, folder):
    """A checkpoint's tensors."""
    if ranks.leads:
        folder.mkdir(parents=True)
    ranks.barrier()
    pieces = {name: [TensorShard(piece.tensor.detach().contiguous(), piece.offset, piece.shape) for piece in pieces]
              for name, pieces in engine.state_shards().items()}
    parts = ranks.collect(write_part(folder / f"rank-{ranks.rank:05}.safetensors", pieces))
    if ranks.leads:
        write_index(folder, Index.joined(parts))
    ranks.barrier()
