"""How blocks run: compiled ones train as others do; selective checkpointing knows products by their names, compiled or
not; what `train.attention` and `train.flash` mean to a run."""

from __future__ import annotations

import logging
from functools import partial

import pytest
import torch
import torch._dynamo
from torch._dynamo.backends.common import aot_autograd
from torch.fx import traceback
from torch.utils._python_dispatch import TorchDispatchMode

from drover.model.attention.backend import Where
from drover.model.attention.sdpa import Sdpa
from drover.model.config import ModelConfig
from drover.model.llama import Llama, initialise
from drover.pipeline.config.training import KEPT_ACTIVATIONS, TrainConfig
from drover.pipeline.core.errors import UserError
from drover.pipeline.parallel import blocks
from drover.pipeline.parallel.blocks import (
    KERNELS,
    OWN,
    PRODUCT_OPERATORS,
    checkpoint_activations,
    choose_attention,
    choose_flash,
    compile_blocks,
    compiled_share,
    uncompiled,
)
from tests.conftest import needs_compiler
from tests.model.test_backends import WAYS, names
from tests.refusal import refused, table
from tests.stages.training import curve, difference, lines, run_train

CONFIG = ModelConfig(dim=32, layers=1, heads=4, kv_heads=2, ffn_dim=48, vocab_size=64, context_length=32)
TOKENS = torch.arange(32).view(1, 32)
DOCUMENTS = torch.tensor([[0] * 9 + [1] * 23])
PRODUCTS = ("wq", "wk", "wv", "wo", "w1", "w3", "w2")


def built(backend, kept=None):
    """A model, checkpointed where `kept` says so."""
    model = Llama(CONFIG)
    initialise(model, CONFIG, seed=0)
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


@pytest.mark.parametrize("kept", [["wq"], ["attention"], ["w1", "wo"], list(KEPT_ACTIVATIONS)])
@pytest.mark.parametrize("backend", WAYS, ids=names)
def test_what_is_named_is_kept_and_the_rest_is_computed_again(backend, kept):
    model = built(backend, kept)
    computed = loss(model)
    with Recomputed(backend.operators) as seen:
        computed.backward()
    # w2's result is no one's input: it depends on who multiplies whether it is computed again beside its input.
    assert {*seen.names} - {"w2"} == {*PRODUCTS, "attention"} - {*kept, "w2"}
    plain = built(backend)
    loss(plain).backward()
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad), name


@pytest.mark.parametrize("kept", [["wo", "w3"], list(KEPT_ACTIVATIONS)])
def test_compiled_blocks_keep_by_name_too(kept, monkeypatch):
    """In the graph of the backward pass each product has two for its gradients, one more if it is computed again."""
    products = []

    def backward(graph, inputs):
        products.append(sum(node.target in PRODUCT_OPERATORS for node in graph.graph.nodes))
        return graph

    torch._dynamo.reset()
    torch._logging.warning_once.cache_clear()
    warned = []
    monkeypatch.setattr(logging.Logger, "handle", lambda self, record: warned.append(record.getMessage()))
    model = built(Sdpa(), kept)
    backend = aot_autograd(fw_compiler=lambda graph, inputs: graph, bw_compiler=backward)
    model.layers[0].forward = torch.compile(model.layers[0].forward, backend=backend)
    loss(model).backward()
    assert products == [2 * len(PRODUCTS) + len({*PRODUCTS} - {*kept, "w2"})]
    assert "context_fn" not in str(warned)


@pytest.mark.slow
@needs_compiler
def test_a_stage_trains_through_inductors_code_as_without(fresh):
    """And measures validation text as without. The compiler is set as users have it."""
    settings = ["train.steps=2", "train.warmup_steps=1", "train.precision=fp64", "train.validation_every=1",
                "train.sample_every=9"]
    run_train(fresh, "name=eager", *settings)
    run_train(fresh, *settings, "train.compile=true")
    assert [record["compiled_share"] for record in lines(fresh)] == [1.0, 1.0]
    result, expected = curve(fresh), curve(fresh, "eager")
    assert difference(result, {record["step"]: record for record in expected}) < 1e-9
    for ours, theirs in zip(result, expected, strict=True):
        assert ours["validation_sample_bpb"] == pytest.approx(theirs["validation_sample_bpb"], rel=1e-9)


@pytest.fixture
def compiled(monkeypatch):
    """A model of one block, compiled without code generation."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    compile_blocks(model := built(Sdpa()), TrainConfig())
    compiled_share()
    return model


def test_blocks_that_need_too_many_graphs_stop_the_run_with_the_reason(compiled):
    with torch._dynamo.config.patch(recompile_limit=1):
        compiled(TOKENS, documents=DOCUMENTS)
        refused(RuntimeError, r"limit of compiled graphs.*size mismatch at index 1.*compile=false", compiled,
                TOKENS[:, :20], documents=DOCUMENTS[:, :20])


def test_the_share_is_of_the_calls_since_it_was_last_asked_without_those_uncompiled_on_purpose(compiled):
    assert compiled_share() is None
    compiled(TOKENS, documents=DOCUMENTS)
    with uncompiled():
        compiled(TOKENS, documents=DOCUMENTS)
    assert compiled_share() == 1.0 and compiled_share() is None
    compiled(TOKENS, documents=DOCUMENTS)
    with torch.compiler.set_stance("force_eager"):
        compiled(TOKENS, documents=DOCUMENTS)
    assert compiled_share() == 0.5


CPU = torch.device("cpu")


def test_what_cannot_be_had_is_said_to_the_user():
    refused(UserError, r"train.attention cannot be used here: attention 'varlen' needs a GPU, not", choose_attention,
            "varlen", Where(CPU, torch.float32, compiled=False, head_dim=32))


@pytest.mark.parametrize("name, capability, installed, taken", table(r"""
    auto -> 9 -> flash_attn_interface flash_attn.cute -> fa3
    auto -> 9 -> none -> own
    auto -> 10 -> flash_attn_interface flash_attn.cute -> own
    fa2 -> 9 -> flash_attn_interface -> own
    fa4 -> 10 -> flash_attn.cute -> fa4
    fa3 -> 9 -> none -> needs the module flash_attn_interface, which is not
    fa3 -> 10 -> flash_attn_interface -> is for compute capability 9\.x, not 10\.x
    fa4 -> 8 -> flash_attn.cute -> is for compute capability 9\.x and 10\.x, not 8\.x
    fa3 -> 0 -> none -> needs a GPU, not a cpu device
    auto -> 0 -> none -> own
    """, str, int, str.split))
def test_newer_flash_kernels_are_used_where_gpu_and_packages_allow(monkeypatch, name, capability, installed, taken):
    activated = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
    monkeypatch.setattr(KERNELS, "activate_flash_attention_impl", activated.append)
    monkeypatch.setattr(blocks, "find_spec", lambda module: module if module in installed else None)
    device = torch.device("cuda", 0) if capability else CPU
    if " " in taken:
        refused(UserError, f"train.flash={name} cannot be used here: it {taken}", choose_flash, name, device)
    else:
        assert choose_flash(name, device) == (OWN if taken == "own" else taken)
    assert activated == ([taken.upper()] if taken in ("fa3", "fa4") else [])
