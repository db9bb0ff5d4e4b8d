"""What of torch's own form can be wrapped, and what is refused with its name."""

import pytest
import torch

from drover.pipeline.core.errors import UserError
from drover.pipeline.training.optimizers import Weight, Wrapped
from tests.refusal import refused
from tests.training.optimizers.kit import model_of


def weights(model):
    return [Weight(name, parameter, 0.0, 1.0) for name, parameter in model.named_parameters()]


def test_a_weight_that_was_left_out_is_named():
    model = model_of()
    inner = torch.optim.SGD([parameter for name, parameter in model.named_parameters() if "wk" not in name], lr=0.1)
    refused(UserError, r"SGD was given 21 parameters and holds 19; layers\.0\.attention\.wk\.weight", Wrapped,
            weights(model), inner, lr=0.1)


@pytest.mark.parametrize(("make", "words"), [
    (lambda parameters: torch.optim.LBFGS(parameters, lr=0.1), "LBFGS cannot be stepped without a closure"),
    (lambda parameters: torch.optim.NAdam(parameters, lr=0.1), "NAdam keeps 'mu_product' of tok_embeddings.weight"),
    (lambda parameters: torch.optim.Adagrad(parameters, lr=0.1, initial_accumulator_value=0.1),
     "Adagrad starts with 'sum' of tok_embeddings.weight other than zeros")])
def test_states_that_could_not_be_carried_on_are_refused(make, words):
    model = model_of()
    refused(UserError, words, Wrapped, weights(model), make(list(model.parameters())), lr=0.1)
