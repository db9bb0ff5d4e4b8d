"""Optimizers as a user would bring them, from a module that Drover knows nothing of."""

import torch

from drover.pipeline.config.optimizers import OptimizerKind, optimizer_settings
from drover.pipeline.parallel.grid import own
from drover.pipeline.training.optimizers.base import Optimizer, parameter_groups


def sgd(weights, config, grid):
    """torch's own form: it is wrapped."""
    momentum = optimizer_settings(config.train)["momentum"]
    return torch.optim.SGD(parameter_groups(weights), lr=config.train.lr, momentum=momentum)


def radam(weights, config, grid):
    """Another of them, whose formula needs the count of updates."""
    return torch.optim.RAdam(parameter_groups(weights), lr=config.train.lr)


class Sign(Optimizer):
    """Steps of equal length, by the sign of a mean: our form, from the outside."""

    def __init__(self, weights, config, grid):
        self.weights = weights
        self.mean = {weight.name: torch.zeros_like(own(weight.parameter.detach())) for weight in weights}

    def state_names(self, name):
        return ("mean",)

    def state(self, name):
        return {"mean": self.mean[name]}

    @torch.no_grad()
    def step(self, lr, clip, applied):
        for weight in self.weights:
            here, mean = own(weight.parameter), self.mean[weight.name]
            fresh = mean.lerp(own(weight.parameter.grad) / clip, 0.1)
            mean.copy_(torch.where(applied, fresh, mean))
            here.copy_(torch.where(applied, here - lr * weight.lr_factor * fresh.sign(), here))

    def resume(self, updates):
        pass


class Impostor:
    """Has a step, and nothing that could clip it or leave it out."""

    def __init__(self, weights, config, grid):
        pass

    def step(self):
        pass


SGD = OptimizerKind(f"{__name__}:sgd", 4, 4, settings={"momentum": 0.9})
RADAM = OptimizerKind(f"{__name__}:radam", 8, 8)
SIGN = OptimizerKind(f"{__name__}:Sign", 4, 4)
IMPOSTOR = OptimizerKind(f"{__name__}:Impostor", 0, 0)
