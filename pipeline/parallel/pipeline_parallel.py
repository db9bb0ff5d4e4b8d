"""Pipeline parallelism: each rank holds some of the layers, and sends activations to the rank with the next ones.

Training follows one of torch's schedules (torch.distributed.pipelining; 1F1B: Narayanan et al. 2019, interleaved:
Narayanan et al. 2021). All ranks of a pipeline hold the tokens of every micro-batch and exchange
hidden states only. Passes without gradients, for validation and texts, run the stages in turn, without a schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from drover.model.llama import Llama
from drover.model.loss import wide
from drover.pipeline.config.training import ParallelConfig
from drover.pipeline.parallel.grid import Grid


class PipelineStage(Llama):
    """Some of a decoder's layers. torch's schedules call it with the output of the stage before.

    Attributes:
        inputs: while a schedule runs, the arguments of `Llama.forward` for each following micro-batch. Schedules take
            them in order. (To look them up by a micro-batch's number, the host would have to wait for the device.)
    """

    inputs: Iterator[Mapping[str, Any]] | None = None

    def forward(self, *given: Any, **named: Any) -> Tensor:
        """As Llama's. In a schedule the only argument is the hidden states."""
        if self.inputs is None:
            return super().forward(*given, **named)
        return super().forward(**next(self.inputs), hidden=None if self.part.embeds else given[0])


class PipelinedModel(nn.Module):
    """The stages on this rank, called like the whole model, by all ranks alike.

    Parameters have their names in the whole model. Calls are for passes without gradients.

    Args:
        stages: of this rank, in order; each a module of FSDP2, if that is used.
        dtype: of the hidden states between stages.

    Attributes:
        names: of the parameters of all stages, in the model's order.
    """

    def __init__(self, stages: Sequence[PipelineStage], grid: Grid, parallel: ParallelConfig,
                 dtype: torch.dtype) -> None:
        super().__init__()
        self.parallel, self.numbers = parallel, parallel.stages_of(grid.pipeline_rank)
        self.stages, self._registered = list(stages), nn.ModuleList(stages)
        self.config, self.grid, self.dtype = stages[0].config, grid, dtype
        self.group = grid.mesh["pipeline"].get_group()
        with torch.device("meta"):
            self.names = [name for name, _ in Llama(self.config).named_parameters()]

    def named_parameters(self, *given: Any, **named: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters of this rank's stages, under their names in the whole model."""
        for stage in self.stages:  # not as modules of this one, which would add a prefix
            yield from stage.named_parameters(*given, **named)

    @torch.no_grad()
    def forward(self, tokens: Tensor, labels: Tensor | None = None, **named: Any) -> Tensor:
        """As Llama's. Logits are the same on every rank. Losses are those of the batch on the ranks of the last stage,
        and zeros on the others, so that early stages can continue with the next batch."""
        result: Tensor | None = None
        for number, stage in zip(self.numbers, self.stages, strict=True):
            hidden = None if stage.part.embeds else self._receive(number, tokens)
            out = stage(tokens, labels, hidden=hidden, **named)
            if stage.part.predicts:
                result = out
            else:
                dist.send(out.contiguous(), group=self.group, group_dst=(number + 1) % self.grid.pipeline)
        if labels is not None:
            shape = tokens.shape if named.get("reduction") == "none" else ()
            return tokens.new_zeros(shape, dtype=wide(self.dtype)) if result is None else result
        if result is None:
            length, words = 1 if named.get("last_only") else tokens.shape[1], self.config.vocab_size
            assert words is not None
            result = tokens.new_empty((tokens.shape[0], length, words), dtype=wide(self.dtype))
        result = result.contiguous()
        dist.broadcast(result, group=self.group, group_src=self.grid.pipeline - 1)
        return result

    def _receive(self, number: int, tokens: Tensor) -> Tensor:
        """The input of a stage."""
        rows, length = tokens.shape
        hidden = tokens.new_empty((rows, length // self.grid.tensor, self.config.dim), dtype=self.dtype)
        dist.recv(hidden, group=self.group, group_src=(number - 1) % self.grid.pipeline)
        return hidden


def make_schedule(model: PipelinedModel, micro_batches: int, shape: tuple[int, int],
                  loss: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """torch's schedule over the stages of all ranks, for steps of so many micro-batches.

    Args:
        shape: (sequences, tokens of each that this rank holds) of a micro-batch.
        loss: (the last stage's output, the micro-batch's number) -> the scalar to differentiate.
    """
    # Slow to import, and unused without a pipeline.
    from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleInterleaved1F1B

    from drover.pipeline.parallel.reducing_stage import ReducingStage

    grid, parallel, device = model.grid, model.parallel, model.grid.ranks.device
    rows, length = shape
    # Only shapes and types. Without them, torch would find these by an extra pass.
    hidden = torch.empty((rows, length // grid.tensor, model.config.dim), dtype=model.dtype, device="meta",
                         requires_grad=True)
    first = torch.empty(1, dtype=torch.int64, device="meta")
    total = torch.empty((), dtype=wide(model.dtype), device="meta", requires_grad=True)
    stages: list[Any] = [ReducingStage(stage, number, parallel.stages, device,
                                       input_args=first if stage.part.embeds else hidden,
                                       output_args=total if stage.part.predicts else hidden, group=model.group)
                         for number, stage in zip(model.numbers, model.stages, strict=True)]
    if parallel.pp_schedule == "1f1b":
        return Schedule1F1B(stages[0], micro_batches, loss_fn=loss, scale_grads=False)
    return ScheduleInterleaved1F1B(stages, micro_batches, loss_fn=loss, scale_grads=False)


def parameter_names(model: nn.Module) -> list[str]:
    """The names of all parameters, including those that other ranks of a pipeline hold."""
    return model.names if isinstance(model, PipelinedModel) else [name for name, _ in model.named_parameters()]
