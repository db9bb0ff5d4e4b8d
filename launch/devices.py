"""GPUs of this machine, found without torch."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from drover.pipeline.core.errors import installed_version

SMI_S = 30.0
"""Time limit for nvidia-smi, which first loads the driver if nothing keeps it loaded."""


MASKS = {"CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"}
"""Variables that say which GPUs a process may use: NVIDIA's and AMD's. The one with the fewest GPUs counts."""


def visible_gpus(environment: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """GPUs that this process may use, NVIDIA's or AMD's, without asking a driver."""
    masks = [[name for name in environment[mask].split(",") if name.strip() not in ("", "-1", "NoDevFiles")]
             for mask in MASKS if mask in environment]
    if masks:
        return min(map(len, masks))
    nvidia = sum(path.name.removeprefix("nvidia").isdigit() for path in devices.glob("nvidia[0-9]*"))
    return nvidia or (len(list(devices.glob("dri/renderD*"))) if for_amd() and (devices / "kfd").exists() else 0)


def masks_in(environment: Mapping[str, str]) -> str:
    """The variables that limit the GPUs of a process, for a message; empty without any."""
    return ", ".join(f"{mask}={environment[mask]}" for mask in sorted(MASKS) if mask in environment)


def has_one_of(gpus: int, environment: Mapping[str, str]) -> bool:
    """Whether a process may use only one of its node's GPUs."""
    return bool(masks_in(environment)) and visible_gpus(environment) == 1 < gpus


def for_amd() -> bool:
    """Whether torch is a build for AMD's GPUs. Without one, AMD devices only drive screens."""
    return "rocm" in (installed_version("torch") or "")


def smi(query: str) -> list[list[str]] | None:
    """What nvidia-smi answers, a row for each GPU that this process may use; None: no answer."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").replace(" ", "")
    only = [f"--id={visible}"] if visible and "MIG" not in visible else []
    for _ in range(2):  # a failure may be temporary
        with suppress(OSError, subprocess.SubprocessError):
            answer = subprocess.run(["nvidia-smi", query, "--format=csv,noheader,nounits", *only], capture_output=True,
                                    text=True, timeout=SMI_S, check=True).stdout
            return [line.split(", ") for line in answer.splitlines() if line]
    return None
