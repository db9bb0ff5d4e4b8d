"""GPUs of this machine, as they are seen without torch."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

SMI_S = 30.0
"""For an answer of nvidia-smi, which loads the driver first where nothing keeps it loaded."""


def visible_gpus(environment: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """GPUs that this process may use, without asking a driver."""
    if (visible := environment.get("CUDA_VISIBLE_DEVICES")) is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1", "NoDevFiles")])
    return sum(path.name.removeprefix("nvidia").isdigit() for path in devices.glob("nvidia[0-9]*"))


def smi(query: str) -> list[list[str]] | None:
    """Rows that nvidia-smi has about the GPUs that this process may use; None: no answer."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").replace(" ", "")
    only = [f"--id={visible}"] if visible and "MIG" not in visible else []
    for _ in range(2):  # a failure may pass
        with suppress(OSError, subprocess.SubprocessError):
            answer = subprocess.run(["nvidia-smi", query, "--format=csv,noheader,nounits", *only], capture_output=True,
                                    text=True, timeout=SMI_S, check=True).stdout
            return [line.split(", ") for line in answer.splitlines() if line]
    return None
