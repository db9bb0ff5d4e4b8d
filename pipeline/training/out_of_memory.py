"""What is said where a GPU has less memory than a step needs."""

from __future__ import annotations

from collections import Counter

import torch

from pipeline.console import readable
from pipeline.parallel.ranks import Ranks
from pipeline.training.engines.engine import Engine


def explanation(error: torch.OutOfMemoryError, engine: Engine, ranks: Ranks, step: int) -> str:
    """What this rank's memory held, and how to find settings that need less.

    step: that was not finished.
    """
    held = Counter[str]()
    for name, shards in engine.state_shards().items():
        held["weights" if name.startswith("model.") else "the optimizer's states"] += sum(
            shard.tensor.nbytes for shard in shards if shard.tensor.device == ranks.device)
    parts = [f"{readable(size)} of {kind}" for kind, size in held.items()]
    has = ""
    if ranks.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(ranks.device)
        tensors, reserved = torch.cuda.memory_allocated(ranks.device), torch.cuda.memory_reserved(ranks.device)
        has = (f" Of {readable(total)}, tensors took {readable(tensors)}, gaps between them "
               f"{readable(reserved - tensors)}, and all else {readable(max(0, total - free - reserved))}.")
    gpu = f" --memory {torch.cuda.mem_get_info(ranks.device)[1] / 1e9:.0f}" if has else " --memory <GB of a GPU>"
    reason = (str(error).splitlines() or ["out of memory"])[0]
    return (f"The memory of rank {ranks.rank}'s device did not suffice in step {step} ({reason}).{has} This rank holds "
            f"{', '.join(parts)}; the rest are gradients, gathered weights, activations and logits. For which modules "
            f"they are, and for settings that were seen to need less, run python -m tools.rehearse with this run's "
            f"--config and settings, --ranks {ranks.world}{gpu}.")
