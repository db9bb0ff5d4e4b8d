"""What holds for every optimizer, whoever wrote it; the formulas of AdamW, Muon and the learning rate; what fits."""

import math
import re

import pytest
import torch

from drover.pipeline.config.optimizers import OPTIMIZERS
from drover.pipeline.config.phases import PhasePlan
from drover.pipeline.config.training import TrainConfig
from drover.pipeline.core.errors import UserError
from drover.pipeline.training.muon import COEFFICIENTS, orthogonal
from drover.pipeline.training.optimizers import Weight, Wrapped, decays, planned_rate
from tests.refusal import refused
from tests.training.optimizer_kit import NO, built, everything, give, model_of, same, step

EXTERNAL = "tests.training.outside"
NAMES = [*OPTIMIZERS, f"{EXTERNAL}:SGD", f"{EXTERNAL}:RADAM"]
every = pytest.mark.parametrize("name", NAMES)


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_rejected_update_changes_no_bit_and_is_as_if_it_had_not_been(name, dtype):
    model = model_of(dtype)
    undisturbed = model_of(dtype)
    optimizer = built(model, optimizer=name)
    expected = built(undisturbed, optimizer=name)
    for number in range(4):
        give(model, value=float("nan"))
        before = everything(model, optimizer)
        step(optimizer, applied=NO)
        assert same(before, everything(model, optimizer)), number
        give(model, number)
        give(undisturbed, number)
        step(optimizer)
        step(expected)
    assert same(everything(model, optimizer), everything(undisturbed, expected)), "counts too: the formula uses them"
    assert not same(before, everything(model, optimizer))


@every
def test_gradients_are_divided_by_the_clip(name):
    """By a power of two, which is exact: the same bits as from gradients that are that much smaller."""
    def trained(smaller=1.0, clip=1.0):
        model = model_of()
        optimizer = built(model, optimizer=name)
        for number, power in enumerate((0, 1, 1)):
            give(model, number)
            for parameter in model.parameters():
                parameter.grad /= smaller**power
            step(optimizer, clip=clip**power)
        return everything(model, optimizer)
    clipped = trained(clip=4.0)
    assert same(clipped, trained(smaller=4.0)) and not same(clipped, trained())


@every
def test_learning_rates_of_some_survive_the_schedule(name):
    """A parameter whose factor is 3 moves as all do where the schedule gives 3 times the learning rate."""
    def trained(factor=1, **settings):
        model = model_of()
        optimizer = built(model, optimizer=name, **settings)
        for number, lr in enumerate((0.001, 0.01, 0.005)):
            give(model, number)
            step(optimizer, lr=factor * lr)
        return model
    names = ("tok_embeddings.weight", "layers.1.feed_forward.w2.weight", "norm.weight")
    plain = trained()
    faster = trained(3)
    factored = trained(lr=0.01, param_groups={
        "layers.1.*.w2.weight": {"lr": 0.03}, "tok*": {"lr": 0.03}, "norm.weight": {"lr": 0.03}, "layers.*": {}})
    for parameter, value in factored.named_parameters():
        like = faster if parameter in names else plain
        torch.testing.assert_close(value, like.get_parameter(parameter), rtol=1e-6, atol=1e-8)
    assert not torch.equal(faster.norm.weight, plain.norm.weight)


@every
def test_states_are_there_from_the_start_and_carry_it_on(name):
    """Filled into a new one, with the count of updates: it goes on to the last bit."""
    model = model_of()
    later = model_of()
    optimizer = built(model, optimizer=name)
    start = everything(model, optimizer)
    assert not any(tensor.any() for key, tensor in start.items() if not key.startswith("model."))
    for number in range(3):
        give(model, number)
        step(optimizer)
    other = built(later, optimizer=name)
    later.load_state_dict(model.state_dict())
    for parameter, _ in later.named_parameters():
        assert other.state(parameter).keys() == set(other.state_names(parameter))
        for kind, place in other.state(parameter).items():
            place.copy_(optimizer.state(parameter)[kind])
    other.resume(3)
    for each, stepped in ((model, optimizer), (later, other)):
        give(each, 3)
        step(stepped)
    assert same(everything(model, optimizer), everything(later, other))


@every
def test_a_group_decays_by_its_own_weight_decay(name):
    """Without gradients a weight only decays: by 1 - lr x decay, where its group says so also a norm."""
    model = model_of()
    before = {key: value.detach().clone() for key, value in model.named_parameters()}
    groups = {"layers.0.*": {"weight_decay": 0.5}, "norm.weight": {"weight_decay": 0.25}}
    optimizer = built(model, optimizer=name, weight_decay=0.1, param_groups=groups)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    step(optimizer, lr=0.01)
    for key, decay in {"layers.0.attention.wq.weight": 0.5, "layers.0.attention_norm.weight": 0.5, "norm.weight": 0.25,
                       "layers.1.attention.wq.weight": 0.1, "layers.1.attention_norm.weight": 0}.items():
        torch.testing.assert_close(model.get_parameter(key), before[key] * (1 - 0.01 * decay), rtol=1e-6, atol=0)


def test_a_pattern_that_fits_no_parameter_is_refused():
    refused(UserError, re.escape("param_groups: 'embeddings.*' matches no parameter. Some are tok_"), built, model_of(),
            param_groups={"embeddings.*": {"lr": 2}})


def test_what_is_no_optimizer_is_refused():
    refused(UserError, r"made a Impostor, which is neither an Optimizer .* not be clipped or skip", built, model_of(),
            optimizer=f"{EXTERNAL}:IMPOSTOR")


def test_norms_and_embeddings_do_not_decay():
    matrices = {f"layers.{layer}.{name}.weight" for layer in range(2) for name in
                ("attention.wq", "attention.wk", "attention.wv", "attention.wo", "feed_forward.w1", "feed_forward.w2",
                 "feed_forward.w3")}
    for tied, expected in ((False, matrices | {"output.weight"}), (True, matrices)):
        assert {name for name, _ in model_of(tied=tied).named_parameters() if decays(name, tied)} == expected


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


def test_impossible_settings_are_refused():
    refused(UserError, r"train\.optimizer_settings: momentum must be at least 0 and below 1", built, model_of(),
            optimizer="muon", optimizer_settings={"momentum": 1.0})


COSINE = {"steps": 111, "warmup_steps": 10, "lr": 1.0, "min_lr_share": 0.1}


def rates(**settings):
    plan = PhasePlan.of(TrainConfig(**settings))
    return [planned_rate(step, plan) for step in range(plan.steps)]


@pytest.mark.parametrize(("settings", "expected"), [
    ({"steps": 100, "warmup_steps": 4, "lr": 0.8}, {0: 0.2, 1: 0.4, 2: 0.6, 3: 0.8, 4: 0.8}),
    ({"steps": 10, "warmup_steps": 0, "lr": 1.0}, {0: 1.0}),
    (COSINE, {10: 1.0, 35: 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 0.25)), 60: 0.55, -1: 0.1}),
    ({"steps": 100, "lr": 1.0, "schedule": "wsd", "warmup_steps": 10, "min_lr_share": 0.0},
     {10: 1.0, 78: 1.0, -11: 0.5, -1: 0.0})])
def test_rates_are_those_of_the_formula(settings, expected):
    result = rates(**settings)
    assert {step: result[step] for step in expected} == pytest.approx(expected)


def weights(model):
    return [Weight(name, parameter, 0.0, 1.0) for name, parameter in model.named_parameters()]


def test_a_weight_that_was_left_out_is_named():
    model = model_of()
    inner = torch.optim.SGD([parameter for name, parameter in model.named_parameters() if "wk" not in name], lr=0.1)
    refused(UserError, r"SGD was given 21 parameters and holds 19; layers\.0\.attention\.wk\.weight", Wrapped,
            weights(model), inner, lr=0.1)


@pytest.mark.parametrize(("make", "words"), [
    (lambda parameters: torch.optim.NAdam(parameters, lr=0.1), "NAdam keeps 'mu_product' of tok_embeddings.weight"),
    (lambda parameters: torch.optim.Adagrad(parameters, lr=0.1, initial_accumulator_value=0.1),
     "Adagrad starts with 'sum' of tok_embeddings.weight other than zeros")])
def test_states_that_could_not_be_carried_on_are_refused(make, words):
    model = model_of()
    refused(UserError, words, Wrapped, weights(model), make(list(model.parameters())), lr=0.1)
