"""Optimizers on several ranks: what they compute, save and leave out does not depend on how the weights are spread."""


import numpy as np
import pytest
import torch

from tests.faulty import Scale
from tests.parallel.groups import run_case
from tests.parallel.matrix import CROSSED
from tests.parallel.train_steps import train_steps, whole


def optimizer_steps(ranks, rejected=(), train=None, **settings):
    """`train_steps` by a schedule of ten steps. rejected: steps whose loss is no number, so that gradients are not
    either.

    Returns, on rank 0: `results`, (loss, norm, applied) of each step; `state`, whole tensors by name as in a
    checkpoint; `held`, whether weights and states were the same to the last bit, on all ranks, after each rejected
    step.
    """
    results, held, engines, scales, copies = [], [], [], [], {}

    def built(engine):
        engines.append(engine)
        scales.append(Scale(engine))

    def before(engine, step):
        scales[0].factor = float("nan") if step in rejected else 1.0
        engine.proven = engine.proven or step in rejected
        copies.update(copied(engine))

    def after(engine, step, result):
        results.append([result.loss, result.grad_norm, result.applied])
        if step in rejected:
            held.append(ranks.sum(any(not torch.equal(copies[key], now) for key, now in copied(engine).items())) == [0])

    train_steps(ranks, train={"steps": 10, "warmup_steps": 2, **(train or {})}, **settings, built=built, before=before,
                after=after)
    return {"results": results, "state": whole(ranks, engines[0].state_shards()), "held": held}


def copied(engine):
    """This rank's weights and states, as they are now."""
    return {(name, number): piece.tensor.detach().clone() for name, pieces in engine.state_shards().items()
            for number, piece in enumerate(pieces)}


def steps(layout, optimizer):
    """Five steps under a layout of CROSSED, of which the first and the fourth are rejected."""
    ranks, parallel = CROSSED[layout]
    return run_case(ranks, optimizer_steps, parallel=parallel, train={"optimizer": optimizer}, steps=5, rejected=(0, 3))


@pytest.mark.parametrize(("layout", "optimizer"), [
    ("FSDP2 x 2", "adamw"), ("HSDP 2 x 2", "muon"),
    ("FSDP2 x tensor parallel 2 x 2", "tests.training.outside:RADAM")])
def test_a_rejected_update_changes_no_bit_on_any_rank(layout, optimizer):
    """Gradients that are no numbers, on all ranks, as the guards leave them out."""
    result, alone = steps(layout, optimizer), steps("one process", optimizer)
    assert result["held"] == [True, True]
    assert [applied for _, _, applied in result["results"]] == [False, True, True, False, True]
    assert result["state"].keys() == alone["state"].keys()
    for name, value in alone["state"].items():
        assert np.linalg.norm(result["state"][name] - value) < 1e-12 * np.linalg.norm(value), name
