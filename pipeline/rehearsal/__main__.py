"""Estimates memory and traffic of a training step for a launcher, in JSON.

Standard input: {"config": path, "overrides": [...], "ranks": N, "gpu": bool, "memory_gb": number or null}. Standard
output, last line: {"lines": [...], "fits": bool, "verdict": text}. If these ranks cannot train it, {"refused": text}.
If the estimate fails, {"failed": text}.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from drover.pipeline.config.loading import load_config
from drover.pipeline.core.errors import NotRehearsedError, UserError
from drover.pipeline.rehearsal.apart import rehearse_apart
from drover.pipeline.rehearsal.fitting import verdict
from drover.pipeline.rehearsal.report import brief, ends_and_middle, fullest


def answered(request: dict[str, Any]) -> dict[str, Any]:
    """See above. Of a pipeline, the first and the last rank are rehearsed: they also hold embedding or output
    matrix."""
    config = load_config(request["config"], request["overrides"], check=False)  # the launcher has checked it
    numbers = ends_and_middle(config, request["ranks"])
    try:
        found = rehearse_apart(config, request["ranks"], sorted({numbers[0], numbers[-1]}), gpu=request["gpu"])
        fits, text = True, ""
        if request["memory_gb"] is not None:
            fits, text = verdict(config, fullest(found), request["memory_gb"] * 1e9, gpu=request["gpu"])
    except NotRehearsedError as error:
        return {"failed": str(error)}
    except UserError as error:
        return {"refused": str(error)}
    return {"lines": [*brief(found), *([text] if fits and text else [])], "fits": fits, "verdict": text}


if __name__ == "__main__":
    print("\n" + json.dumps(answered(json.load(sys.stdin))))
