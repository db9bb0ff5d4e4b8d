"""Cross-entropy over a large vocabulary without ever holding all logits.

For 8,192 tokens and Llama 3's vocabulary of 128,256 the float32 logits alone are 4.2 GB, and so is their gradient.
Here the rows are processed in chunks. Each chunk's gradients are computed while its logits exist, so the peak is a few
times one chunk.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from drover.model.linear import add_weight_gradient, product

IGNORED = -100
"""Label of a position that has no target."""

CHUNKS = {"cpu": (256, 0), "accelerator": (2048, 2**25)}
"""How many rows have logits at the same time: the first number, or any multiple of it whose logits have at most the
second number of elements.

CPU, 2,048 x 288 -> 8,192 in float32, forward + backward on 2 threads with MKL: 207 ms without chunks (torch's own
cross-entropy), 168 with chunks of 256, 175 with 512 or 128, 190 with 1,024.

Accelerators: smaller chunks would spend most time on adding up the weight's gradient (calculated, not measured). For
Llama 3's vocabulary one chunk is 1 GiB in float32, or half of it in bfloat16 with compiled passes. A small vocabulary
gets larger chunks, since launching the kernels of many small ones takes longer than their work."""



def wide(dtype: torch.dtype) -> torch.dtype:
    """The element type in which values of `dtype` are summed: at least float32."""
    return torch.promote_types(dtype, torch.float32)


class VocabularyPartition:
    """The part of the vocabulary whose rows of the output matrix this process has: here, all of it.

    Tensor parallelism gives each rank a slice; `drover.pipeline.parallel.tensor_parallel` derives a class for it.
    """

    def columns(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Each row's label as a column of this part's logits, and whether the part has it: (rows, 1) both."""
        ignored = (labels == IGNORED).unsqueeze(-1)
        return labels.unsqueeze(-1).masked_fill(ignored, 0), ~ignored

    def normaliser(self, part: Tensor) -> Tensor:
        """Log-sum-exp over the whole vocabulary, from that of this part: (rows, 1)."""
        return part

    def total(self, part: Tensor) -> Tensor:
        """Sum over all parts: (rows, 1)."""
        return part


@dataclass(frozen=True)
class Passes:
    """The two passes over a chunk's logits, each compiled into one or two kernels. Logits keep the type of the product,
    and the gradient overwrites them, so no float32 matrix is ever written.

    log_sum_exp: see `log_sum_exp`. gradient: see `into_gradient`.
    """

    used: ClassVar[bool] = True
    """False while compiled code is switched off. Run eagerly, these passes need more memory than the other way."""

    log_sum_exp: Callable[[Tensor], Tensor]
    gradient: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

    @classmethod
    def compiled(cls) -> "Passes":
        """By torch.compile, for any number of rows."""
        return cls(torch.compile(log_sum_exp, fullgraph=True), torch.compile(into_gradient, fullgraph=True))


def log_sum_exp(logits: Tensor) -> Tensor:
    """Log-sum-exp of logits (rows, vocabulary) in any type: (rows, 1) in at least float32."""
    return logits.to(wide(logits.dtype)).logsumexp(dim=-1, keepdim=True)


def into_gradient(logits: Tensor, normaliser: Tensor, factors: Tensor, columns: Tensor, own: Tensor) -> Tensor:
    """Overwrite logits (rows, vocabulary) by softmax(logits) * factors - onehot(label).

    The other arguments are (rows, 1). normaliser: log-sum-exp over the whole vocabulary. factors: 0 in ignored rows.
    columns, own: from `VocabularyPartition.columns`.
    """
    of_label = (torch.arange(logits.shape[1], device=logits.device) == columns) & own
    probabilities = (logits.to(normaliser.dtype) - normaliser).exp() * factors
    return logits.copy_(probabilities - of_label.to(normaliser.dtype))


class Losses:
    """The losses of a decoder's last hidden states against labels, through its output matrix.

    The decoder calls only `total` and `each`. Tensor parallelism replaces this object.

    Attributes:
        z_loss: see `cross_entropy_sum`. For `total` only, because `each` is for evaluation.
        passes: compiled passes over logits for `total`; not used while `Passes.used` is False.
    """

    z_loss: float = 0.0
    passes: Passes | None = None

    def total(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """`cross_entropy_sum` for hidden (batch, length, dim) and labels (batch, length)."""
        hidden, weight, vocabulary = self.at_hand(hidden, weight)
        return cross_entropy_sum(hidden.flatten(0, 1), weight, labels.flatten(), vocabulary=vocabulary,
                                 z_loss=self.z_loss, passes=self.passes if Passes.used else None)

    def each(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """`token_losses` for the same shapes: (batch, length)."""
        hidden, weight, vocabulary = self.at_hand(hidden, weight)
        return token_losses(hidden.flatten(0, 1), weight, labels.flatten(), vocabulary=vocabulary).view(labels.shape)

    def at_hand(self, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, VocabularyPartition]:
        """Whole hidden states, the rows of the output matrix in this process, and their part of the vocabulary: all."""
        return hidden, weight, FULL


FULL = VocabularyPartition()


def cross_entropy_sum(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    chunk_tokens: int | None = None,
    vocabulary: VocabularyPartition = FULL,
    z_loss: float = 0.0,
    passes: Passes | None = None,
) -> Tensor:
    """Sum over the rows of -log softmax(hidden @ weight.T)[label], in nats, without rows labelled -100.

    z_loss: the factor of the squared log-sum-exp of each row, which is added to its loss to keep logits from drifting
    (PaLM, Chowdhery et al. 2022, section 5). passes: None for separate operators.

    hidden: (rows, dim); weight: (vocabulary, dim); labels: (rows,) int64. Logits are computed in the weight's
    dtype, the rest in float32 (float64 stays float64). Returns a scalar in float32 or float64, which can be
    differentiated once, with respect to hidden and weight. If `weight` is a slice of the vocabulary, the gradient
    of hidden is this slice's part: the caller sums the parts.
    """
    assert hidden.shape[0] == labels.shape[0] and hidden.shape[1] == weight.shape[1]
    # Inside a Function gradients always appear disabled, and needs_input_grad ignores no_grad: check here.
    chunk = _chunk(hidden, weight, chunk_tokens)
    return _ChunkedCrossEntropy.apply(hidden, weight, labels, chunk, vocabulary, z_loss, passes,
                                      torch.is_grad_enabled())


@torch.no_grad()
def token_losses(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    chunk_tokens: int | None = None,
    vocabulary: VocabularyPartition = FULL,
) -> Tensor:
    """Each row's loss in nats, without gradient: (rows,) float32 or float64, 0 for label -100."""
    chunk = _chunk(hidden, weight, chunk_tokens)
    losses = [
        _chunk_losses(_logits(h, weight), target, vocabulary)[0]
        for h, target in zip(torch.split(hidden, chunk), torch.split(labels, chunk), strict=True)
    ]
    return torch.cat(losses)


def _chunk(hidden: Tensor, weight: Tensor, chunk_tokens: int | None) -> int:
    if chunk_tokens is not None:
        return chunk_tokens
    rows, elements = CHUNKS["cpu" if hidden.device.type == "cpu" else "accelerator"]
    return rows * max(1, elements // (rows * weight.shape[0]))


def _logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """(rows, vocabulary) in at least float32, from a product in the weight's dtype."""
    logits = product(hidden.to(weight.dtype), weight)
    return logits.to(wide(weight.dtype))


def _chunk_losses(
    logits: Tensor, labels: Tensor, vocabulary: VocabularyPartition, z_loss: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Losses (rows,), 0 in ignored rows, and factors (rows, 1).

    Overwrites the logits, the largest tensor here, by exponentials that cannot overflow. These times the factors are
    the gradient of both terms, except the label's own part: the probabilities, or with a z-loss those times 1 + 2
    z_loss log-sum-exp. So no exponential is computed twice.
    """
    columns, own = vocabulary.columns(labels)
    target = vocabulary.total(logits.gather(-1, columns).masked_fill_(~own, 0.0))
    largest = logits.amax(dim=-1, keepdim=True)
    exponentials = logits.sub_(largest).exp_()
    normaliser = vocabulary.normaliser(largest + exponentials.sum(dim=-1, keepdim=True).log_())
    losses, factors = normaliser - target, (largest - normaliser).exp_()
    if z_loss:
        losses += z_loss * normaliser.square()
        factors *= 1 + 2 * z_loss * normaliser
    return losses.squeeze(-1).masked_fill(labels == IGNORED, 0.0), factors


def _fused_losses(
    logits: Tensor, labels: Tensor, vocabulary: VocabularyPartition, z_loss: float, passes: Passes
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses (rows,), 0 in ignored rows, and two arguments of `into_gradient`: normaliser and factors. Does not change
    the logits."""
    columns, own = vocabulary.columns(labels)
    normaliser = vocabulary.normaliser(passes.log_sum_exp(logits))
    losses = normaliser - vocabulary.total(logits.gather(-1, columns).to(normaliser.dtype).masked_fill_(~own, 0.0))
    factors = torch.ones_like(normaliser)
    if z_loss:
        losses += z_loss * normaliser.square()
        factors += 2 * z_loss * normaliser
    ignored = (labels == IGNORED).unsqueeze(-1)
    return losses.masked_fill_(ignored, 0.0).squeeze(-1), normaliser, factors.masked_fill_(ignored, 0.0)


def _logits_gradient(exponentials: Tensor, factors: Tensor, labels: Tensor, vocabulary: VocabularyPartition) -> Tensor:
    """softmax(logits) - onehot(label), 0 in ignored rows. Overwrites the exponentials of `_chunk_losses`."""
    gradient = exponentials.mul_(factors.masked_fill((labels == IGNORED).unsqueeze(-1), 0.0))
    columns, own = vocabulary.columns(labels)
    return gradient.scatter_add_(-1, columns, -own.to(gradient.dtype))


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        chunk_tokens: int,
        vocabulary: VocabularyPartition,
        z_loss: float,
        passes: Passes | None,
        gradients: bool,
    ) -> Tensor:
        summed = wide(weight.dtype)
        loss = torch.zeros((), dtype=summed, device=hidden.device)
        hidden_gradient = torch.empty_like(hidden) if gradients and ctx.needs_input_grad[0] else None
        weight_gradient = (
            torch.zeros_like(weight, dtype=summed) if gradients and ctx.needs_input_grad[1] else None
        )
        for start in range(0, hidden.shape[0], chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            if passes is None:
                logits = _logits(hidden[rows], weight)
                losses, factors = _chunk_losses(logits, labels[rows], vocabulary, z_loss)
            else:
                logits = product(hidden[rows].to(weight.dtype), weight)
                losses, normaliser, factors = _fused_losses(logits, labels[rows], vocabulary, z_loss, passes)
            loss += losses.sum()
            if hidden_gradient is None and weight_gradient is None:
                continue
            if passes is None:
                gradient = _logits_gradient(logits, factors, labels[rows], vocabulary).to(weight.dtype)
            else:
                gradient = passes.gradient(logits, normaliser, factors, *vocabulary.columns(labels[rows]))
            if hidden_gradient is not None:
                hidden_gradient[rows] = product(gradient, weight.T)
            if weight_gradient is not None:
                add_weight_gradient(weight_gradient, gradient, hidden[rows].to(weight.dtype))
            del logits, gradient  # or they would exist together with the next chunk's: 1.6 GB for Llama 3's vocabulary
        ctx.weight_dtype = weight.dtype
        ctx.save_for_backward(hidden_gradient, weight_gradient)
        return loss

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, loss_gradient: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None, None, None]:
        hidden_gradient, weight_gradient = ctx.saved_tensors
        if hidden_gradient is not None:
            hidden_gradient = hidden_gradient * loss_gradient
        if weight_gradient is not None:
            weight_gradient = (weight_gradient * loss_gradient).to(ctx.weight_dtype)
        return hidden_gradient, weight_gradient, None, None, None, None, None, None
