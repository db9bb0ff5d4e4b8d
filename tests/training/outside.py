"""Optimizers as a user would bring them, from a module that Drover knows nothing of."""

import torch

from drover.pipeline.config.optimizers import OptimizerKind, optimizer_settings
from drover.pipeline.training.optimizers import parameter_groups


def sgd(weights, config, grid):
    """torch's own form: it is wrapped."""
    momentum = optimizer_settings(config.train)["momentum"]
    return torch.optim.SGD(parameter_groups(weights), lr=config.train.lr, momentum=momentum)


def radam(weights, config, grid):
    """Another of them, whose formula needs the count of updates."""
    return torch.optim.RAdam(parameter_groups(weights), lr=config.train.lr)


class Impostor:
    """Has a step, and nothing that could clip it or leave it out."""

    def __init__(self, weights, config, grid):
        pass

    def step(self):
        pass


SGD = OptimizerKind(f"{__name__}:sgd", settings={"momentum": 0.9})
RADAM = OptimizerKind(f"{__name__}:radam")
IMPOSTOR = OptimizerKind(f"{__name__}:Impostor")
