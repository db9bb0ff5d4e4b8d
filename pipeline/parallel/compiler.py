"""torch.compile needs a C or C++ compiler: looked for before training starts."""

from __future__ import annotations

import os
import shutil

import torch

from drover.pipeline.config.training import TrainConfig
from drover.pipeline.core.errors import UserError
from drover.pipeline.parallel.compiling import compiles


def refuse_without_compiler(train: TrainConfig, device: torch.device) -> None:
    """Refuse a run that compiles its blocks if torch would find no compiler.

    Raises:
        UserError: names what is missing. Otherwise the first step would end in a traceback of torch's.
    """
    if not compiles(train, device):
        return
    gpu = device.type == "cuda"
    # As torch's inductor and, for GPUs, Triton look for it.
    variable, names = ("CC", ("gcc", "clang")) if gpu else ("CXX", ("g++",))
    chosen = os.environ.get(variable)
    if any(shutil.which(name) for name in ((chosen,) if chosen else names)):
        return
    wanted = f"{chosen} ({variable})" if chosen else " or ".join(names)
    default = ", which is the default on GPUs" if train.compile is None else ""
    raise UserError(f"train.compile is on{default}, and torch.compile needs a compiler, but there is no {wanted} on "
                    f"this machine. Install one (apt-get install g++), or set train.compile=false.")
