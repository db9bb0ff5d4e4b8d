"""torch's scaled dot product attention: without a mask for plain causal attention, with a dense one for documents; or
each document alone, by kernels without a mask.

The dense mask is the reference for all other backends. On a GPU it excludes the flash kernels and needs repeated heads,
so `auto` takes it there only if no other backend can run. Document by document, nothing is computed between documents,
and nothing above the diagonal that a causal kernel skips. `auto` takes that on CPUs, as measured
(benchmarks/RESULTS.md). Neighbouring documents of equal length, such as whole rows, are one call.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from drover.model.attention.backend import Backend, Documents, Where

ANY_SHAPE = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Kernels without start-up time for a new shape. cuDNN plans each new shape, for 40 to 100 ms on an H200."""


def dense_mask(
    length: int, start: int, documents: Tensor | None, device: torch.device, dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The mask that is added to the scores: (batch or 1, 1, length, start + length), 0 if a query sees a key, else
    -inf.

    The queries are tokens start .. start + length - 1, the keys all tokens up to there. documents: (batch,
    length) ints, only with start 0; tokens of different documents do not see each other.

    A boolean mask would be converted to this one in each layer, and each copy kept for the backward pass: 134 MB per
    layer at 8,192 tokens in bf16.
    """
    assert documents is None or start == 0, "a cache holds one document"
    seen = torch.ones(length, start + length, dtype=torch.bool, device=device).tril(start)[None, None]
    if documents is not None:
        seen = seen & (documents[:, None, :, None] == documents[:, None, None, :])
    return torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, -torch.inf)


def segment_mask(documents: Documents, dtype: torch.dtype) -> Tensor:
    """The mask of segments (`Documents.keys`): (1, 1, queries, keys), with values as in `dense_mask`."""
    device = documents.numbers.device
    queries, keys = (torch.tensor(lengths, device=device) for lengths in (documents.lengths, documents.key_lengths))
    number = torch.arange(len(queries), device=device)
    segment, segment_of_key = number.repeat_interleave(queries), number.repeat_interleave(keys)
    # A query's or a key's distance from the end of its segment. The ends of queries and keys coincide.
    behind = queries.cumsum(0)[segment] - torch.arange(len(segment), device=device)
    behind_of_key = keys.cumsum(0)[segment_of_key] - torch.arange(len(segment_of_key), device=device)
    distance = behind_of_key - behind[:, None]  # (queries, keys)
    seen = (segment[:, None] == segment_of_key) & (distance >= 0)
    mask = torch.full((1, 1, len(segment), documents.key_rows), -torch.inf, dtype=dtype, device=device)
    mask[0, 0, :, :len(segment_of_key)].masked_fill_(seen, 0)
    return mask


class Sdpa(Backend):
    """The dense mask, (batch, 1, length, length). Every layer computes all scores."""

    name = "sdpa"
    segments = True
    operators = frozenset({
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    })  # the unfused kernel consists of other products and is recomputed

    def unsupported(self, where: Where) -> str:
        """See Backend. It runs everywhere."""
        return ""

    def prepare(self, documents: Documents, dtype: torch.dtype) -> Tensor:
        """See Backend: the mask."""
        if documents.keys is not None:
            return segment_mask(documents, dtype)
        numbers = documents.numbers
        return dense_mask(numbers.shape[1], 0, numbers, numbers.device, dtype)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, prepared: Tensor | None) -> Tensor:
        """See Backend. prepared: a mask as `dense_mask` makes it; None is plain causal attention, and a single query
        without a mask sees every key."""
        mask, group = prepared, q.shape[2] // k.shape[2]
        # Measured on CPU (2 x 256 tokens, 6 heads over 2, width 48, float32, forward + backward): enable_gqa
        # is 2-6 % faster than repeating k and v, on 1 and 2 threads, with and without a mask. On CUDA the
        # flash kernel supports groups but neither masks nor float32. The memory-efficient kernel supports those
        # but no groups: with enable_gqa torch would silently use the kernel that stores all scores. So heads
        # are repeated there.
        kernel_groups = not q.is_cuda or (mask is None and q.dtype != torch.float32)
        if group > 1 and not kernel_groups:
            k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
        # Training has few shapes, for which cuDNN may be the fastest. In generation each token is a new shape.
        new_shapes = q.is_cuda and not torch.is_grad_enabled() and not torch.compiler.is_compiling()
        with sdpa_kernel(ANY_SHAPE) if new_shapes else nullcontext():
            out = F.scaled_dot_product_attention(
                q.transpose(1, 2),
                k.transpose(1, 2),
                v.transpose(1, 2),
                attn_mask=mask,
                is_causal=mask is None and q.shape[1] > 1,
                enable_gqa=group > 1 and kernel_groups,
            )
        return out.transpose(1, 2)


class DocumentRun(NamedTuple):
    """Neighbouring documents of equal length.

    documents: how many. length: queries of each. keys: of each. Only a segment has more keys than queries; it is a run
    of its own, with a mask if it has several queries.
    """

    documents: int
    length: int
    keys: int
    mask: Tensor | None = None


HALF_PRECISION_FROM = 512
"""Tokens of a row from which this is faster than the dense mask in bfloat16 on a CPU, as measured. Shorter rows use the
mask. In float32 this is never slower. Only the shape decides, so that a repeated step has the same bits."""

_ALONE = Sdpa()


class ByDocument(Backend):
    """Calls the kernel once for each run of documents of equal length."""

    name = "by_document"
    segments = True
    operators = Sdpa.operators

    def unsupported(self, where: Where) -> str:
        """See Backend. A graph would contain the documents' lengths, which change with every batch."""
        return "cannot be compiled, because every batch has documents of other lengths" if where.compiled else ""

    def prepare(self, documents: Documents, dtype: torch.dtype) -> tuple[DocumentRun, ...] | Tensor:
        """See Backend: runs of documents, or the dense mask if it is faster."""
        short = documents.numbers.shape[1] < HALF_PRECISION_FROM
        if short and dtype.itemsize == 2 and documents.numbers.is_cpu:
            return _ALONE.prepare(documents, dtype)
        runs: list[DocumentRun] = []
        for length, keys in zip(documents.lengths, documents.key_lengths, strict=True):
            if runs and runs[-1][1:3] == (length, keys) and length == keys:
                runs[-1] = runs[-1]._replace(documents=runs[-1].documents + 1)
            else:
                masked = keys > length > 1
                mask = dense_mask(length, keys - length, None, documents.numbers.device, dtype) if masked else None
                runs.append(DocumentRun(1, length, keys, mask))
        return tuple(runs)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, prepared: tuple[DocumentRun, ...] | Tensor) -> Tensor:
        """See Backend."""
        if isinstance(prepared, Tensor):
            return _ALONE.attend(q, k, v, prepared)
        # One split and one concatenation: slicing would create a gradient of the whole row for each document.
        queries = q.flatten(0, 1).split([run.documents * run.length for run in prepared])
        sizes = [run.documents * run.keys for run in prepared]
        rest = k.shape[0] * k.shape[1] - sum(sizes)  # padding keys
        keys, values = (tensor.flatten(0, 1).split([*sizes, rest])[:-1] for tensor in (k, v))
        outputs = []
        for run, *parts in zip(prepared, queries, keys, values, strict=True):
            a, b, c = (part.unflatten(0, (run.documents, -1)) for part in parts)
            outputs.append(_ALONE.attend(a, b, c, run.mask).flatten(0, 1))
        return (torch.cat(outputs) if len(outputs) > 1 else outputs[0]).view(q.shape)
