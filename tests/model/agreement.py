"""Two computations compared, results and gradients; and the operators that one runs."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def agree(found, expected, inputs, *, value=1e-13, gradient=1e-12):
    """Assert that results of the same inputs are equal up to `value`, and their gradients up to `gradient`.

    value, gradient: absolute bounds.
    """
    torch.testing.assert_close(found, expected, rtol=0, atol=value)
    chance = torch.Generator().manual_seed(1)
    upstream = torch.randn(expected.shape, dtype=expected.dtype, generator=chance) if expected.ndim else \
        torch.full_like(expected, -1.5)
    pairs = zip(*(torch.autograd.grad(result, inputs, upstream) for result in (found, expected)), strict=True)
    for mine, golden in pairs:
        torch.testing.assert_close(mine, golden, rtol=0, atol=gradient)


class Recorder(TorchDispatchMode):
    """Notes the name of each operator that runs, and the size of the largest tensor that one makes."""

    def __init__(self):
        super().__init__()
        self.names, self.largest = [], 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.name())
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.largest = max(self.largest, result.numel())
        return result


def operators(action):
    """Names of the operators that `action` runs."""
    with Recorder() as recorder:
        action()
    return recorder.names
