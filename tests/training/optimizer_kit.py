"""A small model with gradients, and optimizers over it in one process."""

import numpy as np
import torch

from drover.model.llama import Llama, initialise
from drover.pipeline.config.training import ParallelConfig, TrainConfig
from drover.pipeline.config.tree import Config
from drover.pipeline.parallel.grid import Grid
from drover.pipeline.parallel.ranks import Ranks
from drover.pipeline.training.optimizers import build_optimizer
from tests.training.engine_kit import MODEL

YES = torch.tensor(True)
NO = torch.tensor(False)


def model_of(dtype=torch.float32, tied=False):
    config = MODEL.model_copy(update={"tied_embeddings": tied})
    model = Llama(config)
    initialise(model, config, seed=0)
    return model.to(dtype)


def built(model, tied=False, **train):
    """train.optimizer of a configuration, over `model` on this process alone."""
    config = Config(model=MODEL, train=TrainConfig(**{"lr": 0.01, **train}))
    return build_optimizer(model, config, Grid(Ranks(0, 1, torch.device("cpu")), ParallelConfig()), tied)


def give(model, step=0, value=None):
    """Gradients: made up for a step, or one value everywhere. They are returned, in float64, by name."""
    for number, parameter in enumerate(model.parameters()):
        made_up = np.random.default_rng([step, number]).standard_normal(tuple(parameter.shape))
        parameter.grad = torch.full_like(parameter, value) if value is not None else \
            torch.from_numpy(made_up).to(parameter.dtype)
    return {name: parameter.grad.double().clone() for name, parameter in model.named_parameters()}


def step(optimizer, lr=0.01, clip=1.0, applied=YES):
    optimizer.step(lr, torch.tensor(clip, dtype=torch.float64), applied)


def everything(model, optimizer):
    """Weights and states, as copies."""
    return {f"{kind}.{name}": tensor.detach().clone() for name, parameter in model.named_parameters()
            for kind, tensor in {"model": parameter, **optimizer.state(name)}.items()}


def same(one, other):
    """Whether two results of `everything` are equal to the last bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
