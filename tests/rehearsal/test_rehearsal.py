"""Rehearsals: against ranks that are there, by the same recorder on fakes and on gloo; what stands in for many
micro-batches and for GPUs, what is found and refused, and the shipped large runs."""

import contextlib
import json
import pickle
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.profiler import ProfilerActivity, profile

from drover.model import llama
from drover.model.attention.backend import Documents, Where
from drover.model.attention.module import Layout
from drover.model.attention.sdpa import Sdpa
from drover.model.config import ModelConfig
from drover.pipeline.config.loading import load_config
from drover.pipeline.config.training import TrainConfig
from drover.pipeline.config.tree import Config, changed
from drover.pipeline.core.console import draw
from drover.pipeline.core.errors import UserError
from drover.pipeline.rehearsal import fitting, step
from drover.pipeline.rehearsal.fitting import fit_in_memory, rehearse_apart
from drover.pipeline.rehearsal.report import ends_and_middle, fullest, page_of
from drover.pipeline.rehearsal.step import FLASH_KERNEL, as_on_gpus, on_gpus
from drover.tools.rehearse import main
from tests.conftest import REPOSITORY
from tests.model.varlen_on_cpu import NAME, VarlenOnCpu
from tests.parallel.conftest import groups_end  # noqa: F401 - a fixture of all
from tests.parallel.groups import run_case
from tests.refusal import refused

MODEL = {"dim": 256, "layers": 4, "heads": 8, "kv_heads": 4, "vocab_size": 2048, "context_length": 1024}


def config_of(**settings):
    """A small run in bfloat16, of four sequences for each rank that has its own."""
    model, train = {**MODEL, **settings.pop("model", {})}, settings.pop("train", {})
    return Config.model_validate({"model": model, **settings, "train": {
        "sequence_length": 512, "batch_tokens": 8 * 512, "micro_batch": 1, "precision": "bf16", "steps": 2,
        "warmup_steps": 1, **train}})


def measured(ranks, gpu=True, **settings):
    """Of every rank, on rank 0; `allocated`: the most that torch's allocator had given out in a step, beyond what was
    there before it. gpu: with the kernel of GPUs, by its stand-in, whose own temporaries no GPU has."""
    config = config_of(**settings)
    as_there = as_on_gpus(config.train) if gpu else contextlib.nullcontext()
    with mock.patch.object(step, "FLASH_KERNEL", NAME), as_there:
        decided, _, shape = step.rehearsable(config, ranks.world, gpu)
        result = step.take_step(decided, shape, ranks, all_micro_batches=True).as_json()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watching:
            step.take_step(decided, shape, ranks, all_micro_batches=True)
    mine = pickle.dumps({**result, "allocated": most(watching)})  # its records are none that ranks tell each other
    return {"ranks": [pickle.loads(part) for part in ranks.gather(mine)]}


def most(watching):
    """The largest sum of what was given less what was taken back."""
    events = [event for event in watching.profiler.kineto_results.events() if event.name() == "[memory]"]
    total = high = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        total += event.nbytes()
        high = max(high, total)
    return high


CLOSE = 0.05


@pytest.mark.parametrize("ranks, gpu, settings", [
    (2, True, {"parallel": {}}),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        (4, False, {"parallel": {"pp": 2, "pp_schedule": "interleaved", "tp": 2}}),
        (4, True, {"parallel": {"dp_replicate": 2, "reshard": "never"},
                   "train": {"optimizer": "muon", "activation_checkpointing": "selective"}}),
        (8, True, {"parallel": {"pp": 2, "cp": 2, "tp": 2}}))),
], ids=["FSDP2", "pipeline x tensor", "HSDP, Muon", "pipeline x context x tensor"])
def test_a_rehearsed_step_is_the_measured_one(ranks, gpu, settings):
    """Calls and bytes of each collective in each group are equal, and so is the peak of memory, kind by kind; in a
    pipeline, where it depends on how fast others are, to 5%. torch's allocator, which also counts what kernels take for
    a moment, has no more than 5% more where the kernels are its own and gloo copies little."""
    real_ranks = run_case(ranks, measured, "rehearsal", gpu=gpu, **settings)["ranks"]
    looked_at = [0, ranks - 1]
    rehearsed = rehearse_apart(config_of(**settings), ranks, looked_at, gpu=gpu, all_micro_batches=True)
    for rank, fake in zip(looked_at, (one.as_json() for one in rehearsed), strict=True):
        real = real_ranks[rank]
        assert fake["collectives"] == real["collectives"]
        assert sum(channel["calls"] for channel in fake["collectives"]) > 20
        assert fake["kinds"] == real["kinds"] or "pp" in settings["parallel"]
        assert fake["peak_bytes"] == sum(fake["kinds"].values()) == pytest.approx(real["peak_bytes"], rel=CLOSE)
        if not gpu:
            assert fake["peak_bytes"] == pytest.approx(real["allocated"], rel=CLOSE)


class Waits(Sdpa):
    """The dense mask, and a look at the device in every layer."""

    name = "waits"

    def attend(self, q, k, v, prepared):
        """See Backend."""
        assert not q.sum().isnan().item()
        return super().attend(q, k, v, prepared)


@pytest.mark.slow
def test_three_micro_batches_stand_for_all():
    config = config_of(train={"batch_tokens": 12 * 512}, parallel={"reshard": "never", "reduce": "last"})
    [some], [every] = (rehearse_apart(config, 2, [1], all_micro_batches=every_batch) for every_batch in (False, True))
    assert some.as_json() | {"notes": []} == every.as_json() | {"notes": []}
    assert "of 6 micro-batches" in some.notes[-1] and not any("micro-batches" in note for note in every.notes)


CONFIG = config_of(train={"micro_batch": 4})


@pytest.fixture(scope="module")
def plain():
    """A step of CONFIG."""
    return rehearse_apart(CONFIG, 2, [0])[0]


def test_what_makes_a_step_slow_is_named_and_a_plain_step_waits_for_nothing(plain, capsys):
    config = config_of(train={"attention": f"{__name__}:Waits"})
    [result] = rehearse_apart(config, 2, [0])
    [place] = result.waits
    assert place.startswith("tests/rehearsal/test_rehearsal.py") and place.endswith("(attend)")
    draw(*page_of(config, [result]), *page_of(CONFIG, [plain]))
    shown = capsys.readouterr().out
    assert place in shown and not plain.waits
    assert "none: the host reads nothing but the result of the step before" in shown


@pytest.mark.parametrize("settings, ranks, rank, text", [
    ({"parallel": {"engine": "deepspeed"}}, 2, 0, "deepspeed', which cannot be rehearsed"),
    ({"model": {"vocab_size": None}, "tokenizer": {"kind": "tiktoken", "path": "there"}}, 2, 0, "Set model.vocab_size"),
    ({}, 3, 0, "not divisible"), ({}, 2, 2, "There is no rank 2 among 2")])
def test_what_cannot_be_rehearsed_is_refused_in_a_paragraph(settings, ranks, rank, text):
    refused(UserError, text, rehearse_apart, config_of(**settings), ranks, [rank])


def test_what_does_not_fit_is_refused_with_what_does(plain, monkeypatch):
    def fit(share):
        return fit_in_memory(CONFIG, plain, share * plain.peak.bytes)

    assert fit(2)[0]
    tight, text = fit(1.05)
    assert tight and "not estimated" in text

    def half(config, *arguments, **options):
        return [replace(plain, peak=replace(plain.peak, bytes=50_000_000))]

    monkeypatch.setattr(fitting, "rehearse_apart", half)
    fits, text = fit(0.8)
    assert not fits and "The largest part is activations" in text
    assert ("and fitting: train.micro_batch=2 (50 MB), or train.activation_checkpointing=selective (50 MB), or "
            "train.activation_checkpointing=full (50 MB).") in text

    def fails(*arguments, **options):
        raise RuntimeError("no memory here\nmore of it")
    monkeypatch.setattr(fitting, "rehearse_apart", fails)
    fits, text = fit(0.8)
    assert not fits and "but not fitting: train.micro_batch=2 (no memory here), " in text
    monkeypatch.setattr(fitting, "SEARCH_S", -1.0)
    assert fit(0.8)[1].endswith(". Take more ranks.")


def test_a_shipped_large_run_is_rehearsed():
    """With fewer layers, one for each stage, and two micro-batches for each of a pipeline's ranks: the ranks, the
    groups and every layer's shapes are those of the run."""
    config = changed(load_config(REPOSITORY / "configs/llama3_70b.yaml"),
                     {"model.layers": 8, "train.batch_tokens": 128 * 8192, "parallel.pp_stages": 2})
    numbers = ends_and_middle(config, 1024)
    assert numbers == [0, 512, 768]
    groups = {"all ranks": 1024, "pipeline": 4, "shard": 32, "tensor": 8}
    for one in rehearse_apart(config, 1024, numbers[::2]):
        assert {channel.group: channel.ranks for channel in one.traffic.calls} == groups
        assert 0 < one.peak.bytes < 40e9 and not one.waits
        assert not any(config.model.vocab_size in item.shape for item in one.peak.items), "of words, a part is held"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ranks"), [("llama_110m", 1), ("llama_350m", 8)])
def test_the_page_has_what_the_command_finds(name, ranks):
    """Two rows of its table; the others take minutes."""
    [line] = [line for line in (REPOSITORY / "docs/memory.md").read_text().splitlines()
              if line.startswith(f"| `{name}`, {ranks} |")]
    config = load_config(REPOSITORY / f"configs/{name}.yaml")
    peak = fullest(rehearse_apart(config, ranks, ends_and_middle(config, ranks))).peak
    cells = [float(cell) for cell in line.split("|")[4:12]]
    assert cells == pytest.approx([size / 1e9 for size in (peak.bytes, *peak.kinds.values())], rel=0.01, abs=0.01)


def test_the_command_rehearses_for_people_and_for_programs(tmp_path, capsys):
    path = tmp_path / "small.yaml"
    path.write_text(json.dumps({**config_of().model_dump(mode="json"), "tokenizer": {"kind": "byte"}}))
    arguments = [str(path), "--ranks", "4"]
    assert main([*arguments, "parallel.pp=2", "--memory", "80"]) == 0
    page = capsys.readouterr().out
    for part in ("4 ranks = pp 2 x dp_shard 2", "1f1b, 2 stages; lost by waiting: 25% of the time used",
                 "pipeline: send", "it fits"):
        assert part in page
    assert main([*arguments, "--rank", "3", "--json"]) == 0
    [result] = json.loads(capsys.readouterr().out)["ranks"]
    assert result["rank"] == 3
    assert {channel["operation"] for channel in result["collectives"]} == {"all-gather", "reduce-scatter", "all-reduce"}
    assert main([str(path), "--ranks", "3"]) == 2 == main([]) == main([str(path)])
    error = capsys.readouterr().err
    assert "Give FILE.yaml and --ranks N (" in error and "Give --ranks N (" in error


CPU, BF16, FP32 = torch.device("cpu"), torch.bfloat16, torch.float32


@pytest.mark.parametrize("name, where, expected", [
    ("auto", Where(CPU, BF16, True, 128), FLASH_KERNEL),
    ("auto", Where(CPU, FP32, True, 128), FLASH_KERNEL),  # in the place of flex
    ("mine:Own", Where(CPU, BF16, True, 128), "mine:Own"),  # the engine says that there is none
])
def test_a_rehearsal_takes_what_gpus_would(name, where, expected):
    assert on_gpus(name, where)[0] == expected


def test_what_could_not_run_there_is_refused():
    refused(UserError, "needs bfloat16, not float32", on_gpus, "varlen", Where(CPU, FP32, False, 128))
    refused(UserError, "'by_document' cannot be compiled", on_gpus, "by_document", Where(CPU, BF16, True, 128))
    assert on_gpus("by_document", Where(CPU, BF16, False, 128)) == ("by_document", "")


SHAPE = ModelConfig(dim=256, layers=1, heads=8, kv_heads=2, ffn_dim=896, vocab_size=512, context_length=512)


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

    x = torch.randn(1, 512, SHAPE.dim, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        call(x, layout).sum().backward()
    return sum(tensor.untyped_storage().nbytes() for tensor in held.values())


def test_a_rehearsed_block_keeps_what_a_compiled_one_would():
    torch._dynamo.reset()
    model = llama.Llama(SHAPE).bfloat16()
    block, documents = model.layers[0], Documents(torch.zeros(1, 512, dtype=torch.int32), (512,))
    layout = Layout(model.rotary_table.at(torch.arange(512)[None], torch.float32), VarlenOnCpu(),
                    VarlenOnCpu().prepare(documents, torch.bfloat16))
    backend = aot_autograd(fw_compiler=lambda graph, inputs: graph, bw_compiler=lambda graph, inputs: graph,
                           partition_fn=min_cut_rematerialization_partition, decompositions=select_decomp_table())
    compiled = kept_bytes(torch.compile(block.forward, backend=backend, fullgraph=True), block, layout)
    with as_on_gpus(TrainConfig()):
        assert kept_bytes(block, block, layout) == pytest.approx(compiled, rel=0.005)
    silu = 512 * SHAPE.hidden * 2
    with as_on_gpus(TrainConfig(compile=False)):
        assert kept_bytes(block, block, layout) == pytest.approx(compiled + silu, rel=0.005)
