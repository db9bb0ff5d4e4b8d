"""AdamW with decoupled weight decay (Loshchilov and Hutter 2019), by torch's fused kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from drover.model.devices import is_mps
from drover.pipeline.config.tree import Config
from drover.pipeline.parallel.grid import Grid, own
from drover.pipeline.training.optimizers.base import ElementwiseOptimizer, Weight, divide_gradients, parameter_groups

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's state, by torch's names; in a checkpoint `exp_avg.<parameter>`, next to `model.<parameter>`."""


class AdamW(ElementwiseOptimizer):
    """Clips gradients and skips updates inside the fused kernel: neither costs a pass over the weights, and nothing
    waits for the host.

    NOTE: torch's kernel for mps (2.13) supports neither, so on mps both are done in separate steps.
    """

    names = MOMENTS

    def __init__(self, weights: Sequence[Weight], config: Config, grid: Grid | None = None) -> None:
        train = config.train
        self.weights = {weight.name: weight for weight in weights}
        self.wide = any(weight.parameter.dtype == torch.float64 for weight in weights)
        # The fused kernel cannot update flat masters on the host from gradients on a GPU.
        self.plain = any(is_mps(weight.parameter.device) for weight in weights)
        self.fused = config.parallel.offload == "none" and not self.plain
        self.torch = torch.optim.AdamW(parameter_groups(weights), lr=train.lr, betas=(train.beta1, train.beta2),
                                       eps=train.eps, fused=self.fused)

    def state(self, name: str) -> dict[str, Tensor]:
        """See Optimizer."""
        return {moment: own(tensor) for moment, tensor in self.state_of(self.weights[name].parameter).items()}

    def state_of(self, tensor: Tensor) -> dict[str, Tensor]:
        """See ElementwiseOptimizer. torch itself would make them in the first step only."""
        return {moment: self._all_of(tensor)[moment] for moment in MOMENTS}

    def step(self, lr: float, clip: Tensor, applied: Tensor) -> None:
        """See Optimizer."""
        self.set_lr(lr)
        kernel = self.torch
        if self.plain:
            if applied:
                divide_gradients(self.weights.values(), float(clip))
                kernel.step()
            return
        if self.wide:  # the kernel takes its divisor in float32
            divide_gradients(self.weights.values(), clip)
        else:  # it divides gradients by `grad_scale` while it reads them: clipping costs no pass of its own
            kernel.grad_scale = clip.float()  # type: ignore[attr-defined]
        kernel.found_inf = (~applied).float()  # type: ignore[attr-defined]  # where it is 1 the update is left out
        kernel.step()

    def resume_at(self, tensor: Tensor, updates: int) -> None:
        """See ElementwiseOptimizer."""
        self._all_of(tensor)["step"].fill_(updates)

    def resume(self, updates: int) -> None:
        """See Optimizer."""
        for weight in self.weights.values():
            self.resume_at(weight.parameter, updates)

    def _all_of(self, tensor: Tensor) -> dict[str, Tensor]:
        """The state of a tensor, `step` included."""
        state: dict[str, Tensor] = self.torch.state[tensor]
        if not state:
            # The fused kernel needs the count on the parameter's device, the others on the host.
            state["step"] = torch.zeros((), dtype=torch.float32, device=tensor.device if self.fused else "cpu")
            state.update({moment: torch.zeros_like(tensor.detach()) for moment in MOMENTS})
        return state
