"""Optimizers on several ranks: what they compute, save and leave out does not depend on how the weights are spread."""

import functools

import numpy as np
import pytest
import torch

from tests.conftest import slow
from tests.formats.cutting import write_checkpoint
from tests.parallel.groups import run_case
from tests.parallel.matrix import CROSSED
from tests.parallel.optimizer_steps import optimizer_steps

ALONE, TWO_AXES = "one process", "FSDP2 x tensor parallel 2 x 2"
OUTSIDE = "tests.training.optimizers.outside"


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
    settings = {"tied": True, "train": (("optimizer", optimizer), ("clip_norm", 0.5),
                                        ("param_groups", {"layers.0.*": {"lr": 6e-3},
                                                          "tok_embeddings.weight": {"lr": 1.5e-3}}))}
    expected = steps(ALONE, **settings)
    assert any(norm > 0.5 for _, norm, _ in expected["results"]), "or nothing is clipped"
    assert "model.output.weight" not in expected["state"] and len(expected["state"]) > 40, "weights alone are 29"
    folder = saved(tmp_path, steps("HSDP 2 x 2", steps=2, **settings))
    for layout in (ALONE, "tensor parallel 2", TWO_AXES):
        assert away(steps(layout, first=2, load=folder, **settings), expected) < 1e-12
