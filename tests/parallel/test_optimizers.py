"""Optimizers on several ranks: what they compute, save and leave out does not depend on how the weights are spread."""

import functools
from pathlib import Path

import numpy as np
import pytest
import torch

from drover.pipeline.formats.sharded_tensors import CheckpointReader
from drover.pipeline.parallel.grid import own
from tests.conftest import slow
from tests.faulty import Scale
from tests.formats.cutting import write_checkpoint
from tests.parallel.groups import run_case
from tests.parallel.matrix import CROSSED
from tests.parallel.train_steps import nothing, train_steps, whole


def optimizer_steps(ranks, first=0, rejected=(), given=False, load=None, train=None, **settings):
    """`train_steps` from step `first` on, by a schedule of ten steps.

    rejected: steps whose loss is no number, so that gradients are not either. given: gradients are replaced by ones
    that are made up whole, the same under every layout. load: the folder of a checkpoint to start from.

    Returns, on rank 0: `results`, (loss, norm, applied) of each step; `state`, whole tensors by name as in a
    checkpoint; `held`, whether weights and states were the same to the last bit, on all ranks, after each rejected
    step.
    """
    results, held, engines, scales, copies = [], [], [], [], {}

    def built(engine):
        engines.append(engine)
        scales.append(Scale(engine))
        if load:
            with CheckpointReader(Path(load)) as reader:
                engine.load(reader, first)

    def before(engine, step):
        scales[0].factor = float("nan") if step in rejected else 1.0
        engine.proven = engine.proven or step in rejected
        copies.update(copied(engine))

    def after(engine, step, result):
        results.append([result.loss, result.grad_norm, result.applied])
        if step in rejected:
            held.append(ranks.sum(any(not torch.equal(copies[key], now) for key, now in copied(engine).items())) == [0])

    train_steps(ranks, first=first, train={"steps": 10, "warmup_steps": 2, **(train or {})}, **settings, built=built,
                before=before, update=give if given else nothing, after=after)
    return {"results": results, "state": whole(ranks, engines[0].state_shards()), "held": held}


def copied(engine):
    """This rank's weights and states, as they are now."""
    return {(name, number): piece.tensor.detach().clone() for name, pieces in engine.state_shards().items()
            for number, piece in enumerate(pieces)}


@torch.no_grad()
def give(engine, step):
    """Replace this rank's gradients by its part of made-up ones."""
    for number, (name, parameter) in enumerate(engine.model.named_parameters()):
        made_up = np.random.default_rng([step, number]).standard_normal(tuple(parameter.shape))
        place = engine.parts[name]
        cut = made_up[tuple(slice(a, a + n) for a, n in zip(place.offset, place.size, strict=True))]
        own(parameter.grad).copy_(torch.from_numpy(cut))


ALONE, TWO_AXES = "one process", "FSDP2 x tensor parallel 2 x 2"
OUTSIDE = "tests.training.outside"


@functools.cache
def alone(**settings):
    """What one process gives; hashable settings, of train as a tuple of pairs."""
    return steps(ALONE, **settings)


def steps(layout, train=(("optimizer", "muon"),), **settings):
    """Under a layout of CROSSED."""
    ranks, parallel = CROSSED[layout]
    return run_case(ranks, optimizer_steps, parallel=parallel, train=dict(train), **{"steps": 4, **settings})


def saved(folder, found):
    """A checkpoint of what a case ended with."""
    write_checkpoint(folder / "step", {name: torch.from_numpy(value) for name, value in found["state"].items()})
    return str(folder / "step")


def away(found, expected):
    """The largest relative difference of a weight or state, norm over norm."""
    assert found["state"].keys() == expected["state"].keys()
    return max(float(np.linalg.norm(found["state"][name] - value) / np.linalg.norm(value))
               for name, value in expected["state"].items())


@pytest.mark.parametrize("layout", ["FSDP2 x 2", "tensor parallel 2", "HSDP 2 x 2", TWO_AXES,
                                    "replicas x tensor parallel 2 x 2"])
def test_on_equal_gradients_muons_bits_are_the_same_under_every_layout(layout):
    """In float32: nothing is left of how ranks are laid out but the order in which gradients are added."""
    settings = {"given": True, "precision": "fp32", "train": (("optimizer", "muon"), ("clip_norm", 1e9))}
    result, expected = steps(layout, **settings), alone(**settings)
    assert all(np.array_equal(result["state"][name], value) for name, value in expected["state"].items())


@pytest.mark.parametrize(("layout", "optimizer"), [
    ("FSDP2 x 2", "adamw"), ("HSDP 2 x 2", "muon"), (TWO_AXES, f"{OUTSIDE}:RADAM")])
def test_a_rejected_update_changes_no_bit_on_any_rank(layout, optimizer):
    """Gradients that are no numbers, on all ranks, as the guards leave them out."""
    train = (("optimizer", optimizer),)
    settings = {"steps": 5, "rejected": (0, 3), "train": train}  # two updates in between, and one after
    result = steps(layout, **settings)
    assert result["held"] == [True, True]
    assert [applied for _, _, applied in result["results"]] == [False, True, True, False, True]
    assert all(np.isfinite(value).all() for value in result["state"].values())
    assert away(result, alone(**settings)) < 1e-12


@pytest.mark.parametrize("optimizer", ["muon", *slow("adamw", f"{OUTSIDE}:RADAM")])
def test_weights_and_states_are_the_same_in_every_layout_and_continue_under_another(tmp_path, optimizer):
    """In float64, with clipping, tied embeddings and learning rates of some: 2e-14 as a rule; torch's own Muon on
    DTensors is 5e-3 away after three steps."""
    width = () if ":" in optimizer else (("mup_base_width", 64),)
    settings = {"tied": True, "train": (("optimizer", optimizer), ("clip_norm", 0.5), *width,
                                        ("param_groups", {"layers.0.*": {"lr": 6e-3},
                                                          "tok_embeddings.weight": {"lr": 1.5e-3}}))}
    expected = steps(ALONE, **settings)
    assert any(norm > 0.5 for _, norm, _ in expected["results"]), "or nothing is clipped"
    assert "model.output.weight" not in expected["state"] and len(expected["state"]) > 40, "weights alone are 29"
    folder = saved(tmp_path, steps("HSDP 2 x 2", steps=2, **settings))
    for layout in (ALONE, "tensor parallel 2", TWO_AXES):
        assert away(steps(layout, first=2, load=folder, **settings), expected) < 1e-12
