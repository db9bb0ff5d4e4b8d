"""A stage of torch's pipelines that reduces gradients while its backward pass still runs."""

from __future__ import annotations

from typing import Any

from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.stage import stage_backward


class ReducingStage(PipelineStage):
    """torch's stage, except in the last backward pass of a step: there each FSDP2 unit starts to reduce its gradients
    as soon as it has them, as without a pipeline. torch's own stage (2.13) starts when all units have them, and waits
    for each in turn.

    The gradients are bit-equal: each rank sums them over all micro-batches and reduces once.
    """

    def backward_maybe_with_nosync(self, backward_type: str, bwd_kwargs: dict[str, Any],
                                   last_backward: bool = False) -> Any:
        """As torch's, which `backward_one_chunk` calls. backward_type: "full", "input" or "weight"."""
        if not (last_backward and backward_type == "full" and isinstance(self.submod, FSDPModule)):
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        self.submod.set_is_last_backward(True)
        self.submod.set_reshard_after_backward(True)
        self.submod.set_requires_gradient_sync(True)
        return stage_backward(bwd_kwargs["stage_output"], bwd_kwargs["output_grads"], bwd_kwargs["input_values"]), None
