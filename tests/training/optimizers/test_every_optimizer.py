"""What holds for every optimizer, whoever wrote it: clipping, leaving out, learning rates, states to carry on."""

import re

import pytest
import torch

from drover.launch.describe import optimizer_bytes, state_bytes_per_rank
from drover.pipeline.config.optimizers import OPTIMIZERS
from drover.pipeline.config.training import ParallelConfig, TrainConfig
from drover.pipeline.config.tree import Config
from drover.pipeline.core.errors import UserError
from tests.refusal import refused
from tests.training.optimizers.kit import MODEL, NO, built, everything, give, model_of, same, step

EXTERNAL = "tests.training.optimizers.outside"
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
def test_the_plan_counts_the_bytes_that_there_are(name):
    model = model_of()
    optimizer = built(model, optimizer=name)
    kept = sum(tensor.nbytes for each, _ in model.named_parameters() for tensor in optimizer.state(each).values())
    weights = sum(parameter.nbytes for parameter in model.parameters())
    config, spread = (Config(model=MODEL, train=TrainConfig(optimizer=name), parallel=ParallelConfig(**parallel))
                      for parallel in ({}, {"engine": "deepspeed", "zero_stage": 3}))
    assert optimizer_bytes(config) == kept
    assert state_bytes_per_rank(config, 1) == kept + 2 * weights
    assert state_bytes_per_rank(spread, 1) == kept + 2.5 * weights, "masters, states, gradients, weights in bf16"


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
