"""Products that are cut, so that a part travels while another is computed."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from drover.pipeline.core.errors import UserError
from drover.pipeline.parallel.ranks import start_ranks, stop_ranks
from drover.pipeline.parallel.tensor_parallel import overlapping
from tests.parallel.fused_products import overlapped
from tests.parallel.groups import run_case
from tests.parallel.matrix import Case, lacks
from tests.parallel.train_steps import train_steps
from tests.refusal import refused

ONE_BLOCK = {"steps": 2, "shape": {"layers": 1}}


@pytest.mark.slow  # compiles
def test_every_exchange_of_a_forward_pass_is_cut_and_nothing_else_changes():
    if lack := lacks(Case("", settings={"backend": "inductor"})):
        pytest.skip(lack)
    expected = run_case(1, train_steps, **ONE_BLOCK)["results"]
    result = run_case(2, overlapped, "async", **ONE_BLOCK, parallel={"tp": 2, "async_tp": True})
    np.testing.assert_allclose(result["results"], expected, rtol=1e-12)
    forward, backward = filter(None, result["graphs"])  # those of the loss exchange nothing
    assert forward == {"fused_all_gather_matmul": 2, "fused_matmul_reduce_scatter": 2}
    # Several products add up to what is scattered there, of which torch cuts none.
    assert backward == {"fused_all_gather_matmul": 2, "reduce_scatter_tensor": 2}


def test_where_ranks_cannot_reach_each_others_memory_it_is_refused():
    start_ranks()
    try:
        refused(UserError, r"parallel.async_tp needs GPUs of one node.*Set parallel.async_tp=false", overlapping,
                dist.group.WORLD, torch.device("cpu"))
    finally:
        stop_ranks()
