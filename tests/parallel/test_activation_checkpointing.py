"""Selective checkpointing knows products by their names, compiled or not."""

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch.fx import traceback
from torch.utils._python_dispatch import TorchDispatchMode

from drover.model.attention.sdpa import Sdpa
from drover.model.config import ModelConfig
from drover.model.llama import Llama, initialise
from drover.pipeline.config.training import KEPT_ACTIVATIONS, TrainConfig
from drover.pipeline.parallel.activation_checkpointing import PRODUCT_OPERATORS, checkpoint_activations
from tests.model.test_backends import WAYS, names

CONFIG = ModelConfig(dim=32, layers=1, heads=4, kv_heads=2, ffn_dim=48, vocab_size=64, context_length=32)
TOKENS = torch.arange(32).view(1, 32)
DOCUMENTS = torch.tensor([[0] * 9 + [1] * 23])
PRODUCTS = ("wq", "wk", "wv", "wo", "w1", "w3", "w2")


def built(backend, kept=None, **shape):
    """A model, checkpointed where `kept` says so."""
    config = CONFIG.model_copy(update=shape)
    model = Llama(config)
    initialise(model, config, seed=0)
    model.backend = backend
    if kept is not None:
        checkpoint_activations(model, TrainConfig(activation_checkpointing="selective", kept_activations=kept))
    return model


def loss(model):
    return model(TOKENS, TOKENS.roll(-1, 1), documents=DOCUMENTS)


class Recomputed(TorchDispatchMode):
    """The names of what linear layers and attention compute while this is active, outside of what was kept."""

    def __init__(self, attention):
        super().__init__()
        self.attention, self.names = attention, []

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        if operator in self.attention:
            self.names.append("attention")
        if operator in PRODUCT_OPERATORS and (name := traceback.get_current_meta().get("custom", {}).get("product")):
            self.names.append(name)
        return operator(*arguments, **options or {})


@pytest.mark.parametrize(("kept", "bias"), [
    (["wq"], True), (["attention"], False), (["w1", "wo"], True), (list(KEPT_ACTIVATIONS), False)])
@pytest.mark.parametrize("backend", WAYS, ids=names)
def test_what_is_named_is_kept_and_the_rest_is_computed_again(backend, kept, bias):
    model = built(backend, kept, qkv_bias=bias)
    computed = loss(model)
    with Recomputed(backend.operators) as seen:
        computed.backward()
    # w2's result is no one's input: it depends on who multiplies whether it is computed again beside its input.
    assert {*seen.names} - {"w2"} == {*PRODUCTS, "attention"} - {*kept, "w2"}
    plain = built(backend, qkv_bias=bias)
    loss(plain).backward()
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad), name


@pytest.mark.parametrize(("kept", "bias"), [(["wo", "w3"], True), (list(KEPT_ACTIVATIONS), False)])
def test_compiled_blocks_keep_by_name_too(kept, bias):
    """In the graph of the backward pass each product has two for its gradients, one more if it is computed again."""
    products = []

    def backward(graph, inputs):
        products.append(sum(node.target in PRODUCT_OPERATORS for node in graph.graph.nodes))
        return graph

    torch._dynamo.reset()
    model = built(Sdpa(), kept, qkv_bias=bias)
    backend = aot_autograd(fw_compiler=lambda graph, inputs: graph, bw_compiler=backward)
    model.layers[0].forward = torch.compile(model.layers[0].forward, backend=backend)
    loss(model).backward()
    assert products == [2 * len(PRODUCTS) + len({*PRODUCTS} - {*kept, "w2"})]
