"""What a rehearsed block keeps for the backward pass is what torch's compiler would have a compiled one keep."""


import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

from drover.model import llama
from drover.model.attention.backend import Documents
from drover.model.attention.layout import Layout
from drover.model.config import ModelConfig
from drover.pipeline.config.training import TrainConfig
from drover.pipeline.rehearsal.step import as_on_gpus
from tests.model.varlen_on_cpu import VarlenOnCpu

CONFIG = ModelConfig(dim=256, layers=1, heads=8, kv_heads=2, ffn_dim=896, vocab_size=512, context_length=512)


def kept_bytes(call, *given):
    """What autograd holds after a call of a block, beside its parameters and what all blocks share."""
    held, (block, layout) = {}, given
    shared = [*block.parameters(), layout.rotation.cos, layout.rotation.sin, layout.rotation.turns, *layout.prepared]
    known = {tensor.untyped_storage().data_ptr() for tensor in shared if isinstance(tensor, torch.Tensor)}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            held[storage.data_ptr()] = tensor  # alive, so that no other takes its place
        return tensor

    x = torch.randn(1, 512, CONFIG.dim, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        call(x, layout).sum().backward()
    return sum(tensor.untyped_storage().nbytes() for tensor in held.values())


@pytest.mark.parametrize("shape", [{}, {"qk_norm": True, "qkv_bias": True}], ids=["Llama", "a descendant"])
def test_a_rehearsed_block_keeps_what_a_compiled_one_would(shape):
    torch._dynamo.reset()
    model = llama.Llama(CONFIG.model_copy(update=shape)).bfloat16()
    block, wide = model.layers[0], torch.float32
    layout = Layout.of(model.rotary_table.at(torch.arange(512)[None], wide), VarlenOnCpu(),
                       Documents(torch.zeros(1, 512, dtype=torch.int32), (512,)), torch.bfloat16)
    backend = aot_autograd(fw_compiler=lambda graph, inputs: graph, bw_compiler=lambda graph, inputs: graph,
                           partition_fn=min_cut_rematerialization_partition, decompositions=select_decomp_table())
    compiled = kept_bytes(torch.compile(block.forward, backend=backend, fullgraph=True), block, layout)
    with as_on_gpus(TrainConfig()):
        assert kept_bytes(block, block, layout) == pytest.approx(compiled, rel=0.005)
    silu = 512 * CONFIG.hidden * 2
    with as_on_gpus(TrainConfig(compile=False)):
        assert kept_bytes(block, block, layout) == pytest.approx(compiled + silu, rel=0.005)
