"""Muon is its formula: held against singular values, torch's own Muon, and AdamW for what is no block's matrix."""

import pytest
import torch

from drover.pipeline.core.errors import UserError
from drover.pipeline.training.muon import COEFFICIENTS, assign_owners, orthogonal
from tests.refusal import refused
from tests.training.optimizers.kit import built, give, model_of, step


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (1, 7)])
def test_the_iterations_are_a_polynomial_of_the_singular_values(shape):
    matrix = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values / matrix.norm()
    for _ in range(5):
        values = sum(factor * values**power for factor, power in zip(COEFFICIENTS, (1, 3, 5), strict=True))
    result = orthogonal(matrix, 5)
    torch.testing.assert_close(result, left @ values.diag() @ right, rtol=1e-9, atol=1e-12)
    assert result.is_contiguous() and values.min() > 0.3 and values.max() < 1.3
    assert not orthogonal(torch.zeros(shape), 5).any()


@pytest.mark.parametrize("nesterov", [True, False])
def test_steps_are_those_of_torchs_own_muon_and_adamw(nesterov):
    """torch iterates in bfloat16: the updates differ by its rounding, weights by that times the learning rate."""
    models = ours, theirs, reference = [model_of() for _ in range(3)]
    settings = {"nesterov": nesterov, "momentum": 0.9}
    optimizer = built(ours, optimizer="muon", optimizer_settings=settings, weight_decay=0.3)
    named = {name: parameter for name, parameter in theirs.named_parameters() if name.startswith("layers.")
             and parameter.dim() == 2}
    muon = torch.optim.Muon(named.values(), lr=0.01, weight_decay=0.3, adjust_lr_fn="match_rms_adamw", **settings)
    adamw = built(reference, weight_decay=0.3)
    start = {name: parameter.detach().clone() for name, parameter in ours.named_parameters()}
    for number in range(3):
        for model in models:
            give(model, number)
        for stepped in (lambda: step(optimizer), muon.step, lambda: step(adamw)):
            stepped()
    assert len(named) == 14
    for name, parameter in ours.named_parameters():
        if name not in named:
            assert torch.equal(parameter, reference.get_parameter(name)), name
            continue
        assert (parameter - named[name]).norm() / (named[name] - start[name]).norm() < 0.03, name
        torch.testing.assert_close(optimizer.state(name)["momentum"], muon.state[named[name]]["momentum_buffer"])


@pytest.mark.parametrize("settings", [{"momentum": 1.0}, {"iterations": 0}])
def test_impossible_settings_are_refused(settings):
    refused(UserError, r"train\.optimizer_settings: momentum must be at least 0 and below 1", built, model_of(),
            optimizer="muon", optimizer_settings=settings)


def test_owners_share_the_work_evenly_and_the_same_everywhere():
    shapes = {f"w{rows}": (rows, 20) for rows in range(1, 41)}
    owners = assign_owners(shapes, 6)
    assert owners == assign_owners(dict(reversed(shapes.items())), 6), "the order of names is no matter"
    loads = [sum(rows * 20 * min(rows, 20) for name, (rows, _) in shapes.items() if owners[name] == rank)
             for rank in range(6)]
    assert max(loads) - min(loads) <= 40 * 20 * 20
    assert set(assign_owners(shapes, 100).values()) == set(range(40)), "fewer matrices than ranks: one each"
