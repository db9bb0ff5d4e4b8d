"""Tensor parallelism: each matrix product is split over a group of ranks, and the sequence between the products.

The layout is Megatron's (Shoeybi et al. 2019; sequence parallelism: Korthikanti et al. 2022). Norms and the residual
stream hold this rank's part of the sequence. Attention and feed-forward all-gather the sequence. Their first products
are split by columns, their last by rows, and a reduce-scatter over the sequence adds up the partial sums. Embedding,
output matrix and loss are split by vocabulary. The model's own code does not change.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from drover.model.llama import Llama
from drover.model.loss import Losses, VocabularyPartition
from drover.pipeline.parallel.blocks import noting_product

GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""The name in torch 2.13, which warns on every rank about the older name."""
SEQUENCE = Shard(1)
"""The placement of activations (batch, length, dim) between the products."""


def apply_tensor_parallel(model: Llama, mesh: DeviceMesh) -> None:
    """Split `model` (on the meta device) over the ranks of the one-dimensional `mesh`, in place."""
    for block in model.layers:
        parallelize_module(block, mesh, {
            "attention_norm": SequenceParallel(),
            "attention": PrepareModuleInput(input_layouts=(SEQUENCE, None, None),
                                            desired_input_layouts=(Replicate(), None, None)),
            "attention.wq": ColwiseParallel(), "attention.wk": ColwiseParallel(), "attention.wv": ColwiseParallel(),
            "attention.wo": SplitRows(output_layouts=SEQUENCE),
            "ffn_norm": SequenceParallel(),
            "feed_forward": PrepareModuleInput(input_layouts=(SEQUENCE,), desired_input_layouts=(Replicate(),)),
            "feed_forward.w1": ColwiseParallel(), "feed_forward.w3": ColwiseParallel(),
            "feed_forward.w2": SplitRows(output_layouts=SEQUENCE)})
    around = {"tok_embeddings": SplitEmbedding(),
              "norm": SequenceParallel(),
              "output": SplitOutput()}
    parallelize_module(model, mesh, {name: style for name, style in around.items() if hasattr(model, name)})
    model.tie()  # both matrices were replaced
    model.losses = SplitLosses(mesh)


class SplitRows(RowwiseParallel):
    """torch's RowwiseParallel, which also notes the layer's name while it sums partial results. Activation
    checkpointing finds the sum by that name."""

    @staticmethod
    def _prepare_output_fn(output_layouts: Any, use_local_output: bool, mod: nn.Module, outputs: Any,
                           device_mesh: DeviceMesh) -> Any:
        with noting_product(mod):
            return RowwiseParallel._prepare_output_fn(output_layouts, use_local_output, mod, outputs, device_mesh)


class SplitEmbedding(ParallelStyle):
    """The embedding split by vocabulary: each rank looks up its own token ids, and a reduce-scatter over the sequence
    adds the results.

    torch's own RowwiseParallel does this too, but gives every rank the gradient of the whole vocabulary: 4.2 GB for
    Llama 3's 405B in bfloat16, and 8.4 GB in a pipeline, where FSDP2 keeps it in float32 throughout a step.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        distribute_module(module, device_mesh, _split_by_vocabulary)
        module.forward = partial(self._look_up, module, device_mesh)
        return module

    @staticmethod
    def _look_up(module: nn.Module, mesh: DeviceMesh, tokens: Tensor) -> Tensor:
        weight = module.get_parameter("weight")
        assert isinstance(weight, DTensor)
        part = weight.to_local()
        columns, own = TensorParallelVocabulary(mesh, part.shape[0]).columns(tokens)  # (batch, length, 1) both
        result = F.embedding(columns.squeeze(-1), part).masked_fill_(~own, 0.0)
        sums = DTensor.from_local(result, mesh, [Partial()], run_check=False)
        return sums.redistribute(placements=[SEQUENCE], async_op=True).to_local()


def _split_by_vocabulary(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    weight = distribute_tensor(module.get_parameter("weight"), mesh, [Shard(0)])
    module.register_parameter("weight", nn.Parameter(weight))


class SplitOutput(ParallelStyle):
    """The output matrix split by vocabulary. It all-gathers its hidden states, which are split by sequence. Logits are
    all-gathered too. Losses need no gathering."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, _split_by_vocabulary, self._gather_states,
                                 self._gather_logits)

    @staticmethod
    def _gather_states(module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        return inputs[0].redistribute(placements=[Replicate()])

    @staticmethod
    def _gather_logits(module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
        return output.full_tensor() if isinstance(output, DTensor) else output


class SplitLosses(Losses):
    """The losses from whole hidden states on every rank and an output matrix split by vocabulary. Every rank of the
    group gets the same values."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh

    def at_hand(self, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, TensorParallelVocabulary]:
        """As in Losses."""
        assert isinstance(hidden, DTensor) and isinstance(weight, DTensor)
        # Each rank's loss uses its own part of the vocabulary: its gradients of the gathered states are partial sums.
        complete = hidden.to_local(grad_placements=[Partial()])
        part = weight.to_local()
        return complete, part, TensorParallelVocabulary(self.mesh, part.shape[0])


class TensorParallelVocabulary(VocabularyPartition):
    """This rank's slice of the vocabulary: `width` token ids, equally many on every rank of the group."""

    def __init__(self, mesh: DeviceMesh, width: int) -> None:
        self.group, self.size, self.width = mesh.get_group(), mesh.size(), width
        self.first = mesh.get_local_rank() * width

    def columns(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """As in VocabularyPartition."""
        columns = labels.unsqueeze(-1) - self.first
        own = (columns >= 0) & (columns < self.width)  # an ignored label is on no rank: it is negative
        return columns.masked_fill(~own, 0), own

    def normaliser(self, part: Tensor) -> Tensor:
        """As in VocabularyPartition."""
        parts = part.new_empty(self.size * part.shape[0], 1)
        GATHER(parts, part.contiguous(), group=self.group)
        return torch.logsumexp(parts.view(self.size, *part.shape), dim=0)

    def total(self, part: Tensor) -> Tensor:
        """As in VocabularyPartition."""
        dist.all_reduce(part, group=self.group)
        return part
