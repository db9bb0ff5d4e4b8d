"""torch's varlen attention with a kernel for CPUs, which torch does not have: all around the kernel runs as on a GPU.

Importing this gives torch the kernel, in this process. As a setting, it is `train.attention=` NAME.
"""

from itertools import pairwise

import torch
from torch.nn.attention import varlen

from drover.model.attention.varlen import Varlen

NAME = "tests.model.varlen_on_cpu:VarlenOnCpu"
CALLS = {"forward": 0, "backward": 0}
"""How often the kernels ran."""


class VarlenOnCpu(Varlen):
    """Varlen, which here can run."""

    def unsupported(self, where):
        """Nothing."""
        return ""


def slices(edges, longest):
    """The tokens of each document or segment, checked as a kernel would have them."""
    places = edges.tolist()
    assert places[0] == 0 and places == sorted(places) and edges.dtype == torch.int32
    assert max(end - start for start, end in pairwise(places)) <= longest, "the kernel would leave out what is beyond"
    return [slice(start, end) for start, end in pairwise(places)]


def shares(q, k, edges, edges_k, longest, longest_k, scale, window):
    """softmax(q k^T), causal from the last query and key of each document on: (heads, queries, keys), its log-sum-exp,
    and the scale."""
    assert tuple(window) == (-1, 0)
    seen = torch.zeros(len(q), len(k), dtype=torch.bool)
    for own, keys in zip(slices(edges, longest), slices(edges_k, longest_k), strict=True):
        part = seen[own, keys]
        assert part.shape[0] <= part.shape[1]
        part[:] = torch.ones_like(part).tril(part.shape[1] - part.shape[0])
    scale = scale or q.shape[-1] ** -0.5
    scores = (torch.einsum("qhd,khd->hqk", q, k) * scale).masked_fill(~seen, -torch.inf)
    return scores.softmax(-1), scores.logsumexp(-1), scale


def repeated(q, *others):
    """Keys or values with a head for each of the queries'."""
    return [whole.repeat_interleave(q.shape[1] // whole.shape[1], 1) for whole in others]


def forward(q, k, v, edges, edges_k, longest, longest_k, is_causal=False, scale=None, window_size=None, *others,
            **named):
    """Of torch_attn::_varlen_attn: output, log-sum-exp (heads, tokens), state of random numbers."""
    CALLS["forward"] += 1
    keys, values = repeated(q, k, v)
    weights, normaliser, _ = shares(q, keys, edges, edges_k, longest, longest_k, scale, window_size)
    out = torch.einsum("hqk,khd->qhd", weights, values.masked_fill(unseen(edges_k, v), 0)).contiguous()
    return out, normaliser.float(), torch.zeros(2, dtype=torch.uint64)


def unseen(edges_k, k):
    """The keys behind the last document's, (keys, 1, 1), which may hold anything."""
    return (torch.arange(len(k)) >= edges_k[-1])[:, None, None]


def backward(gradient, q, k, v, out, normaliser, edges, edges_k, longest, longest_k, is_causal, state, scale=None,
             window_size=None):
    """Of torch_attn::_varlen_attn_backward: gradients of q, k, v. Those of keys in no document are what a kernel may
    leave there: anything."""
    CALLS["backward"] += 1
    keys, values = (whole.masked_fill(unseen(edges_k, k), 0) for whole in repeated(q, k, v))
    weights, _, scale = shares(q, keys, edges, edges_k, longest, longest_k, scale, window_size)
    towards = torch.einsum("qhd,khd->hqk", gradient, values)
    scores = weights * (towards - (towards * weights).sum(-1, keepdim=True)) * scale
    of_keys, of_values = (torch.einsum("hqk,qhd->khd", part, whole).unflatten(1, (k.shape[1], -1)).sum(2).masked_fill(
        unseen(edges_k, k), torch.nan) for part, whole in ((scores, q), (weights, gradient)))
    return torch.einsum("hqk,khd->qhd", scores, keys).contiguous(), of_keys, of_values


varlen._varlen_attn.register_kernel("cpu")(forward)
varlen._varlen_attn_backward.register_kernel("cpu")(backward)
