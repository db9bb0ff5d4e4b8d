"""What is to run compiled runs compiled: every call of a block in training and in validation."""

from functools import partial

import pytest
import torch
import torch._dynamo

from drover.model.attention.sdpa import Sdpa
from drover.pipeline.config.training import TrainConfig
from drover.pipeline.parallel.compiling import compile_blocks, compiled_share, uncompiled
from tests.conftest import needs_compiler, slow
from tests.model.varlen_on_cpu import NAME
from tests.parallel.groups import run_case
from tests.parallel.matrix import CHECKPOINTING
from tests.parallel.test_activation_checkpointing import DOCUMENTS, TOKENS, built
from tests.parallel.train_steps import compiled_calls
from tests.stages.training import curve, difference, lines, run_train

LAYERS = 6
"""More than the graphs that `compiled_calls` allows: were one not shared, the run would stop."""
KINDS = {"sliding_window": 7, "full_attention_interval": 3, "no_rope_layer_interval": 2}
"""Of 6 layers, those with a window or not, rotated or not: four kinds."""


OPTIONS = {
    "full checkpointing, four kinds of layers": (1, {"train": CHECKPOINTING["full"], "shape": KINDS}),
    "every second, across documents, tied": (1, {
        "tied": True, "train": {"across_documents": True, **CHECKPOINTING["every second"]}}),
    "fp8": (1, {"precision": "fp8", "train": CHECKPOINTING["selective"]}),
    "FSDP2, bf16, accumulation": (2, {"precision": "bf16", "accumulation": 2, "train": CHECKPOINTING["selective"]}),
    "ZeRO 1": (2, {"precision": "fp32", "parallel": {"engine": "deepspeed", "zero_stage": 1},
                   "train": CHECKPOINTING["selective"]}),
    "interleaved pipeline and tensor parallel, weights kept": (4, {
        "parallel": {"pp": 2, "pp_schedule": "interleaved", "tp": 2, "reshard": "never"}, "accumulation": 2,
        "train": {"attention": NAME, **CHECKPOINTING["every second"]}}),
    "tensor and context parallel, four kinds of layers": (4, {
        "parallel": {"tp": 2, "cp": 2}, "shape": KINDS, "train": {"attention": NAME, **CHECKPOINTING["selective"]}})}
FAST = "FSDP2, bf16, accumulation"


@pytest.mark.parametrize("case", [FAST, *slow(*(name for name in OPTIONS if name != FAST))])
def test_every_call_of_a_block_runs_compiled(case):
    """Also with more layers than torch allows graphs, and of all kinds of layers."""
    ranks, settings = OPTIONS[case]
    settings = {**settings, "shape": {"layers": LAYERS, **settings.get("shape", {})}}
    result = run_case(ranks, compiled_calls, "compiled", steps=3, backend="aot_eager", **settings)
    pipelined = settings.get("parallel", {}).get("pp", 1)
    for calls, eager in result["calls"]:
        assert calls >= LAYERS * ranks // pipelined * (settings.get("accumulation", 1) + 1) and eager == 0
    assert len(result["calls"]) == 3


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
        assert ours["validation_bpb"] == pytest.approx(theirs["validation_bpb"], rel=1e-9)


@pytest.fixture
def compiled(monkeypatch):
    """A model of one block, compiled without code generation."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    compile_blocks(model := built(Sdpa()), TrainConfig())
    compiled_share()
    return model


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
