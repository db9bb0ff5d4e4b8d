"""The chunked cross-entropy against torch's own."""

import pytest
import torch
import torch.nn.functional as F

from drover.model.loss import Passes, cross_entropy_sum, into_gradient, log_sum_exp, token_losses
from drover.pipeline.training.device import compiled_graphs
from tests.model.agreement import Recorder, agree


def example(rows: int = 13, dim: int = 6, vocabulary: int = 11, dtype: torch.dtype = torch.float64):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, dim, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, dim, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    labels = torch.randint(vocabulary, (rows,), generator=generator)
    labels[::4] = -100
    return hidden, weight, labels


def golden(hidden, weight, labels, z_loss=0.0):
    """Each row's loss by torch's cross-entropy, with the z-loss of its formula."""
    logits = hidden @ weight.T
    losses = F.cross_entropy(logits, labels, reduction="none")
    return losses + z_loss * logits.logsumexp(dim=-1).square() * (labels != -100)


def in_double(hidden, weight, labels, scale=1.0):
    """The sum of the losses by torch's cross-entropy in float64, and its gradients."""
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    loss = golden(exact[0] * scale, exact[1], labels).sum()
    return loss.item(), torch.autograd.grad(loss, exact)


@pytest.mark.parametrize("passes", [None, Passes(log_sum_exp, into_gradient)])
@pytest.mark.parametrize("z_loss", [0.0, 0.03])
@pytest.mark.parametrize("chunk", [1, 4, 100, None])
def test_equals_torch(chunk, z_loss, passes):
    hidden, weight, labels = example()
    loss = cross_entropy_sum(hidden, weight, labels, chunk, z_loss=z_loss, passes=passes)
    expected = golden(hidden, weight, labels, z_loss).sum()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-13)
    agree(loss, expected, [hidden, weight], value=1e-11, gradient=1e-13)
    losses = token_losses(hidden, weight, labels, chunk)
    assert torch.allclose(losses, golden(hidden, weight, labels), rtol=0, atol=1e-13) and not losses.requires_grad


@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_float32_and_peaked_logits(scale):
    hidden, weight, labels = example(rows=70, dim=16, vocabulary=40, dtype=torch.float32)
    loss = cross_entropy_sum(hidden * scale, weight, labels, 32)
    expected, gradients = in_double(hidden, weight, labels, scale)
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    for actual, known in zip(torch.autograd.grad(loss, (hidden, weight)), gradients, strict=True):
        # A logit of a thousand is known to 1e-4 in float32, and so is its probability.
        assert (actual - known).abs().max() <= (1e-6 if scale == 1 else 1e-3) * known.abs().max()


@pytest.mark.parametrize("dtype, bound", [
    pytest.param(torch.float32, 1e-6, marks=pytest.mark.slow), (torch.bfloat16, 2e-2)])
def test_compiled_passes_are_as_exact_and_serve_any_number_of_rows(dtype, bound):
    hidden, weight, labels = example(rows=70, dim=16, vocabulary=40, dtype=dtype)
    expected, gradients = in_double(hidden, weight, labels)
    torch._dynamo.reset()
    graphs, passes = compiled_graphs(), Passes.compiled()
    for chunk in (64, 32, 7):  # and what is left of 70: 6
        loss = cross_entropy_sum(hidden, weight, labels, chunk, z_loss=0.0, passes=passes)
        assert loss.dtype == torch.float32 and loss.item() == pytest.approx(expected, rel=bound)
        for actual, known in zip(torch.autograd.grad(loss, (hidden, weight)), gradients, strict=True):
            assert actual.dtype == dtype and (actual.double() - known).norm() <= bound * known.norm()
    assert 2 <= compiled_graphs() - graphs <= 4, "one graph for the first number of rows, and one for all others"


def test_never_holds_all_logits():
    hidden, weight, labels = example(rows=64, vocabulary=32)
    with Recorder() as recorder:
        cross_entropy_sum(hidden, weight, labels, 8).backward()
    assert recorder.largest <= max(8 * 32, hidden.numel(), weight.numel())


def test_without_any_target_loss_and_gradients_are_zero():
    hidden, weight, labels = example()
    loss = cross_entropy_sum(hidden, weight, torch.full_like(labels, -100))
    assert loss.item() == 0 and torch.autograd.grad(loss, weight)[0].eq(0).all()


@pytest.mark.parametrize("wrong", [11, -1])
def test_labels_outside_the_vocabulary_are_an_error(wrong):
    hidden, weight, labels = example()
    labels[1] = wrong
    with pytest.raises((IndexError, RuntimeError)):
        cross_entropy_sum(hidden, weight, labels)


def test_bfloat16_sums_in_float32():
    hidden, weight, labels = example(rows=4096, dtype=torch.bfloat16)
    loss = cross_entropy_sum(hidden, weight, labels, chunk_tokens=8)
    gradients = torch.autograd.grad(loss, (hidden, weight))
    assert loss.dtype == torch.float32
    assert [gradient.dtype for gradient in gradients] == [torch.bfloat16, torch.bfloat16]
    logits = (hidden @ weight.T).float()
    assert loss.item() == pytest.approx(F.cross_entropy(logits, labels, reduction="sum").item(), rel=1e-5)
    _, (_, known) = in_double(hidden, weight, labels)
    # One rounding of the result, at most 2^-9, and few before; 512 bfloat16 additions would lose far more.
    assert (gradients[1].double() - known).norm() / known.norm() < 2**-8
