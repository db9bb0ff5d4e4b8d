"""The chunked cross-entropy against torch's own."""

import pytest
import torch
import torch.nn.functional as F

import model.linear
from model.kernels import ByOnednn
from model.loss import cross_entropy_sum, token_losses


def example(rows: int = 13, dim: int = 6, vocabulary: int = 11, dtype: torch.dtype = torch.float64):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, dim, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, dim, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    labels = torch.randint(vocabulary, (rows,), generator=generator)
    labels[::4] = -100
    return hidden, weight, labels


@pytest.mark.parametrize("chunk", [1, 4, 13, 100, None])
def test_equals_torch(chunk):
    hidden, weight, labels = example()
    loss = cross_entropy_sum(hidden, weight, labels, chunk)
    gradients = torch.autograd.grad(0.25 * loss, (hidden, weight))
    expected = F.cross_entropy(hidden @ weight.T, labels, reduction="sum")
    expected_gradients = torch.autograd.grad(0.25 * expected, (hidden, weight))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-13)
    for actual, golden in zip(gradients, expected_gradients, strict=True):
        assert torch.allclose(actual, golden, rtol=0, atol=1e-13)


@pytest.mark.parametrize("chunk", [1, 4, None])
def test_z_loss_is_that_of_its_formula(chunk):
    hidden, weight, labels = example()
    loss = cross_entropy_sum(hidden, weight, labels, chunk, z_loss=0.03)
    gradients = torch.autograd.grad(0.25 * loss, (hidden, weight))
    logits = hidden @ weight.T
    expected = F.cross_entropy(logits, labels, reduction="sum") + \
        0.03 * logits.logsumexp(dim=-1)[labels != -100].square().sum()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-13) and loss > cross_entropy_sum(hidden, weight, labels)
    for actual, golden in zip(gradients, torch.autograd.grad(0.25 * expected, (hidden, weight)), strict=True):
        assert torch.allclose(actual, golden, rtol=0, atol=1e-13)


def test_no_z_loss_is_the_same_to_the_bit():
    hidden, weight, labels = example(rows=70, dtype=torch.float32)
    plain, none = (cross_entropy_sum(hidden, weight, labels, 8, **more) for more in ({}, {"z_loss": 0.0}))
    assert torch.equal(plain, none)


@pytest.mark.parametrize("by_onednn", [ByOnednn(), ByOnednn(True, False), ByOnednn(True, True)])
@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_float32_and_peaked_logits(by_onednn, scale, monkeypatch):
    if any(by_onednn) and not torch.backends.mkldnn.is_available():
        pytest.skip("this torch is without oneDNN")
    monkeypatch.setattr(model.linear, "by_onednn", lambda: by_onednn)
    hidden, weight, labels = example(rows=70, dim=16, vocabulary=40, dtype=torch.float32)
    loss = cross_entropy_sum(hidden * scale, weight, labels, 32)
    gradients = torch.autograd.grad(loss, (hidden, weight))
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    expected = F.cross_entropy((exact[0] * scale) @ exact[1].T, labels, reduction="sum")
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for actual, golden in zip(gradients, torch.autograd.grad(expected, exact), strict=True):
        # A logit of a thousand is known to 1e-4 in float32, and so is its probability.
        assert (actual - golden).abs().max() <= (1e-6 if scale == 1 else 1e-3) * golden.abs().max()


def test_gradcheck():
    hidden, weight, labels = example(rows=5, dim=3, vocabulary=4)
    assert torch.autograd.gradcheck(lambda h, w: cross_entropy_sum(h, w, labels, 2), (hidden, weight))


def test_only_the_wanted_gradients():
    hidden, weight, labels = example()
    full = torch.autograd.grad(cross_entropy_sum(hidden, weight, labels, 4), (hidden, weight))
    (for_hidden,) = torch.autograd.grad(cross_entropy_sum(hidden, weight.detach(), labels, 4), hidden)
    (for_weight,) = torch.autograd.grad(cross_entropy_sum(hidden.detach(), weight, labels, 4), weight)
    assert torch.equal(full[0], for_hidden) and torch.equal(full[1], for_weight)


def test_no_gradient_is_computed_under_no_grad():
    hidden, weight, labels = example()
    operations: list[str] = []

    class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            operations.append(function.name())
            return function(*args, **(kwargs or {}))

    with Recorder():
        with_gradient = cross_entropy_sum(hidden, weight, labels, 4)
    assert any("scatter_add" in name for name in operations)
    operations.clear()
    with Recorder(), torch.no_grad():
        without = cross_entropy_sum(hidden, weight, labels, 4)
    assert not any("scatter_add" in name for name in operations)
    assert torch.equal(with_gradient, without) and not without.requires_grad


def test_never_holds_all_logits():
    hidden, weight, labels = example(rows=64, vocabulary=32)
    largest = 0

    class Watcher(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                largest = max(largest, result.numel())
            return result

    with Watcher():
        cross_entropy_sum(hidden, weight, labels, 8).backward()
    assert largest <= max(8 * 32, hidden.numel(), weight.numel())


def test_ignored_rows_count_nothing():
    hidden, weight, labels = example()
    kept = labels != -100
    loss = cross_entropy_sum(hidden, weight, labels)
    assert loss.item() == pytest.approx(
        cross_entropy_sum(hidden[kept], weight, labels[kept]).item(), rel=1e-13
    )
    gradient = torch.autograd.grad(loss, hidden)[0]
    assert gradient[~kept].eq(0).all() and gradient[kept].ne(0).all()
    everything_ignored = cross_entropy_sum(hidden, weight, torch.full_like(labels, -100))
    assert everything_ignored.item() == 0
    assert torch.autograd.grad(everything_ignored, weight)[0].eq(0).all()


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
    exact_hidden, exact_weight = hidden.detach().double(), weight.detach().double().requires_grad_()
    exact = F.cross_entropy(exact_hidden @ exact_weight.T, labels, reduction="sum")
    (golden,) = torch.autograd.grad(exact, exact_weight)
    # One rounding of the result, at most 2^-9, and few before; 512 bfloat16 additions would lose far more.
    assert (gradients[1].double() - golden).norm() / golden.norm() < 2**-8


def test_token_losses():
    hidden, weight, labels = example()
    losses = token_losses(hidden, weight, labels, 4)
    expected = F.cross_entropy(hidden @ weight.T, labels, reduction="none")
    assert torch.allclose(losses, expected, rtol=0, atol=1e-13)
    assert losses[labels == -100].eq(0).all() and not losses.requires_grad
