"""Asynchronous tensor parallelism without GPUs: what the compiler cuts, and that the pieces add up. The stand-ins that
torch has for its operators compute what they would, with ordinary collectives."""

import contextlib
from collections import Counter
from unittest import mock

import torch
import torch._inductor.config
import torch.distributed as dist
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.distributed import _symmetric_memory as symmetric_memory

from tests.parallel.train_steps import train_steps

OPERATORS = ("fused_all_gather_matmul", "fused_matmul_reduce_scatter")


class Count(CustomGraphPass):
    """Counts the exchanges in each graph, after the pass that fuses them with products."""

    def __init__(self):
        self.graphs = []

    def __call__(self, graph):
        names = [node.target.__name__.partition(".")[0] for node in graph.nodes if node.op == "call_function"]
        self.graphs.append(Counter(name for name in names if "gather" in name or "reduce_scatter" in name))

    def uuid(self):
        return None


def overlapped(ranks, **settings):
    """`train_steps` with parallel.async_tp, and the exchanges of each graph that was compiled on this rank."""
    library, count = torch.library.Library("symm_mem", "IMPL", "CPU"), Count()
    for name in OPERATORS:
        library.impl(name, getattr(symmetric_memory, f"_{name}"))
    with contextlib.ExitStack() as patches:
        patches.enter_context(symmetric_memory._test_mode())
        for owner, name in ((symmetric_memory, "empty"), (symmetric_memory, "rendezvous"), (dist, "is_nccl_available")):
            patches.enter_context(mock.patch.object(owner, name, mock.Mock(return_value=True)))
        # After the passes torch's own operators compute: to compile code for them takes minutes.
        patches.enter_context(torch._inductor.config.patch(post_grad_custom_post_pass=count, fallback_by_default=True,
                                                           force_disable_caches=True))
        results = train_steps(ranks, backend="inductor", **settings)["results"]
    return {"results": results, "graphs": [dict(graph) for graph in count.graphs]}
