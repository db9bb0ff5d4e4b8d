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

    def lacks(self, where):
        """Nothing."""
        return ""


def documents(edges, edges_k, longest, longest_k, window):
    """(queries, keys) of each document or segment that has any, as slices, checked as a kernel would have them."""
    assert window[0] >= -1 and window[1] == 0
    queries, keys = slices(edges, longest), slices(edges_k, longest_k)
    assert len(queries) == len(keys)
    assert all(count(own) <= count(seen) for own, seen in zip(queries, keys, strict=True))
    return [(own, seen) for own, seen in zip(queries, keys, strict=True) if count(own)]


def slices(edges, longest):
    """Of each document, with those that have nothing."""
    places = edges.tolist()
    assert places[0] == 0 and places == sorted(places) and edges.dtype == torch.int32
    found = [slice(start, end) for start, end in pairwise(places)]
    assert max(map(count, found)) <= longest, "the kernel would leave out what is beyond"
    return found


def count(tokens):
    """How many there are in a slice."""
    return tokens.stop - tokens.start


def weights(q, k, scale, window):
    """softmax(q k^T) of one document, causal from the last query and key on, and window[0] keys back: (heads, queries,
    keys), and its log-sum-exp."""
    scores = torch.einsum("qhd,khd->hqk", q, k) * (scale or q.shape[-1] ** -0.5)
    more = len(k) - len(q)
    seen = torch.ones(scores.shape[1:], dtype=torch.bool).tril(more)
    seen = seen if window[0] < 0 else seen.triu(more - window[0])
    scores = scores.masked_fill(~seen, -torch.inf)
    return scores.softmax(-1), scores.logsumexp(-1)


def forward(q, k, v, edges, edges_k, longest, longest_k, is_causal=False, scale=None, window_size=None, *others,
            **named):
    """Of torch_attn::_varlen_attn: output, log-sum-exp (heads, tokens), state of random numbers."""
    CALLS["forward"] += 1
    group = q.shape[1] // k.shape[1]
    out, normaliser = torch.empty_like(q), torch.empty(q.shape[1], q.shape[0], dtype=torch.float32)
    for own, seen in documents(edges, edges_k, longest, longest_k, window_size):
        keys, values = (whole[seen].repeat_interleave(group, 1) for whole in (k, v))
        shares, normaliser[:, own] = weights(q[own], keys, scale, window_size)
        out[own] = torch.einsum("hqk,khd->qhd", shares, values)
    return out, normaliser, torch.zeros(2, dtype=torch.uint64)


def backward(gradient, q, k, v, out, normaliser, edges, edges_k, longest, longest_k, is_causal, state, scale=None,
             window_size=None):
    """Of torch_attn::_varlen_attn_backward: gradients of q, k, v. Those of keys in no document are what a kernel may
    leave there: anything."""
    CALLS["backward"] += 1
    group = q.shape[1] // k.shape[1]
    found = tuple(torch.full_like(whole, torch.nan) for whole in (q, k, v))
    for own, seen in documents(edges, edges_k, longest, longest_k, window_size):
        queries, keys, values = q[own], *(whole[seen].repeat_interleave(group, 1) for whole in (k, v))
        shares, _ = weights(queries, keys, scale, window_size)
        upstream = gradient[own]
        towards = torch.einsum("qhd,khd->hqk", upstream, values)
        scores = shares * (towards - (towards * shares).sum(-1, keepdim=True)) * (scale or q.shape[-1] ** -0.5)
        found[0][own] = torch.einsum("hqk,khd->qhd", scores, keys)
        for total, part in ((found[1], torch.einsum("hqk,qhd->khd", scores, queries)),
                            (found[2], torch.einsum("hqk,qhd->khd", shares, upstream))):
            total[seen] = part.unflatten(1, (-1, group)).sum(2)
    return found


varlen._varlen_attn.register_kernel("cpu")(forward)
varlen._varlen_attn_backward.register_kernel("cpu")(backward)
