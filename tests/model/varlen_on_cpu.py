"""torch's varlen attention with a kernel for CPUs, which torch does not have: all around the kernel runs as on a GPU.

Importing this gives torch the kernel, in this process. As a setting, it is `train.attention=` NAME.
"""

from itertools import pairwise

import torch
from torch.nn.attention import varlen

from model.attention.varlen import Varlen

NAME = "tests.model.varlen_on_cpu:VarlenOnCpu"
CALLS = {"forward": 0, "backward": 0}
"""How often the kernels ran."""


class VarlenOnCpu(Varlen):
    """Varlen, which here can run."""

    def lacks(self, where):
        """Nothing."""
        return ""


def documents(edges, longest, window):
    """(first token, end) of each that has any, checked as a kernel would have it."""
    places = edges.tolist()
    assert places[0] == 0 and places == sorted(places) and edges.dtype == torch.int32
    assert max(end - start for start, end in pairwise(places)) <= longest, "the kernel would leave out what is beyond"
    assert window[0] >= -1 and window[1] == 0
    return [(start, end) for start, end in pairwise(places) if end > start]


def weights(q, k, scale, window):
    """softmax(q k^T) of one document, causal and window[0] keys back: (heads, length, length), and its log-sum-exp."""
    scores = torch.einsum("qhd,khd->hqk", q, k) * (scale or q.shape[-1] ** -0.5)
    seen = torch.ones(scores.shape[1:], dtype=torch.bool).tril()
    seen = seen if window[0] < 0 else seen.triu(-window[0])
    scores = scores.masked_fill(~seen, -torch.inf)
    return scores.softmax(-1), scores.logsumexp(-1)


def forward(q, k, v, edges, edges_k, longest, longest_k, is_causal=False, scale=None, window_size=None, *others,
            **named):
    """Of torch_attn::_varlen_attn: output, log-sum-exp (heads, tokens), state of random numbers."""
    CALLS["forward"] += 1
    group = q.shape[1] // k.shape[1]
    out, normaliser = torch.empty_like(q), torch.empty(q.shape[1], q.shape[0], dtype=torch.float32)
    for start, end in documents(edges, longest, window_size):
        keys, values = (whole[start:end].repeat_interleave(group, 1) for whole in (k, v))
        shares, normaliser[:, start:end] = weights(q[start:end], keys, scale, window_size)
        out[start:end] = torch.einsum("hqk,khd->qhd", shares, values)
    return out, normaliser, torch.zeros(2, dtype=torch.uint64)


def backward(gradient, q, k, v, out, normaliser, edges, edges_k, longest, longest_k, is_causal, state, scale=None,
             window_size=None):
    """Of torch_attn::_varlen_attn_backward: gradients of q, k, v."""
    CALLS["backward"] += 1
    group = q.shape[1] // k.shape[1]
    found = tuple(torch.empty_like(whole) for whole in (q, k, v))
    for start, end in documents(edges, longest, window_size):
        own, keys, values = q[start:end], *(whole[start:end].repeat_interleave(group, 1) for whole in (k, v))
        shares, _ = weights(own, keys, scale, window_size)
        upstream = gradient[start:end]
        towards = torch.einsum("qhd,khd->hqk", upstream, values)
        scores = shares * (towards - (towards * shares).sum(-1, keepdim=True)) * (scale or q.shape[-1] ** -0.5)
        found[0][start:end] = torch.einsum("hqk,khd->qhd", scores, keys)
        for total, part in ((found[1], torch.einsum("hqk,qhd->khd", scores, own)),
                            (found[2], torch.einsum("hqk,qhd->khd", shares, upstream))):
            total[start:end] = part.unflatten(1, (-1, group)).sum(2)
    return found


varlen._varlen_attn.register_kernel("cpu")(forward)
varlen._varlen_attn_backward.register_kernel("cpu")(backward)
