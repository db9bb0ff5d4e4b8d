"""A stage of torch's pipelines that reduces gradients while it still computes."""

from __future__ import annotations

from typing import Any

from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.stage import stage_backward


class ReducingStage(PipelineStage):
    """torch's stage, but for the last backward pass of a step: each of FSDP2's units begins to reduce its gradients
    when it has them, as without a pipeline. torch's own (2.13) begins when all units have them, and waits for each.

    Gradients are the same bits: of all micro-batches they are summed on each rank first, and reduced once. zbv's
    passes for weights alone run none of FSDP2's hooks, and are torch's (but for the first stage's, which is a whole
    one).
    """

    def backward_maybe_with_nosync(self, backward_type: str, bwd_kwargs: dict[str, Any],
                                   last_backward: bool = False) -> Any:
        """torch's, which `backward_one_chunk` calls; of the passes "full", "input" and "weight"."""
        if not (last_backward and backward_type == "full" and isinstance(self.submod, FSDPModule)):
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        self.submod.set_is_last_backward(True)
        self.submod.set_reshard_after_backward(True)
        self.submod.set_requires_gradient_sync(True)
        return stage_backward(bwd_kwargs["stage_output"], bwd_kwargs["output_grads"], bwd_kwargs["input_values"]), None
