"""Products by oneDNN against torch's own: the same numbers to rounding, in every place where a layer may stand."""

import pytest
import torch
import torch.nn.functional as F

import drover.model.linear
from drover.model.kernels import ByOnednn
from drover.model.linear import Linear, add_weight_gradient, product
from tests.model.agreement import operators

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch is without oneDNN")
ONEDNN = "mkldnn::_linear_pointwise"


@pytest.fixture(autouse=True, params=[ByOnednn(True, True), ByOnednn(True, False)], ids=["all", "with the weight"])
def onednn(monkeypatch, request):
    """As on processors where it is the faster one: it gives right results on any."""
    monkeypatch.setattr(drover.model.linear, "by_onednn", lambda: request.param)
    return request.param


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def close(actual: torch.Tensor, exact: torch.Tensor) -> bool:
    """Within float32's rounding of a sum of up to 64 products, some of which cancel."""
    return actual.shape == exact.shape and bool(
        (actual.double() - exact).abs().max() <= 3e-6 * max(1.0, exact.abs().max().item()))


def as_exact(x: torch.Tensor, outputs: int, last=torch.Tensor.sum) -> bool:
    """Whether a layer's result for x, and the gradients of `last` of it, are those in float64."""
    layer = Linear(x.shape[-1], outputs)
    x = x.requires_grad_()
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, layer.weight)]
    out, golden = layer(x), F.linear(*exact)
    actual = torch.autograd.grad(last(out), (x, layer.weight))
    return close(out, golden) and all(map(close, actual, torch.autograd.grad(last(golden), exact)))


@pytest.mark.parametrize("shape", [(7,), (1,), (64,), (2, 5), (1, 1), (3, 1, 4)])
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (1, 9), (9, 1), (17, 33)])
def test_values_and_gradients(shape, inputs, outputs):
    upstream = random(*shape, outputs, seed=1)
    assert as_exact(random(*shape, inputs), outputs, lambda out: (out * upstream).sum())


WIDE = random(10, 32, seed=1)


@pytest.mark.parametrize("x", [WIDE[:, ::2], WIDE[:, 16:], random(16, 10).T, random(1, 16).expand(10, 16)])
@pytest.mark.parametrize("last", [
    torch.Tensor.sum, lambda out: (out.T.contiguous().T * 2).sum(), lambda out: out[:, ::2].sum()])
def test_inputs_that_are_views_and_gradients_that_are_one_number_expanded_or_lie_across(x, last):
    x = x.detach()
    assert close(product(x, random(6, 16)), x.double() @ random(6, 16).double().T)
    assert as_exact(x, 6, last)


def test_no_rows():
    layer = Linear(8, 4)
    out = layer(torch.empty(0, 8, requires_grad=True))
    assert out.shape == (0, 4)
    out.sum().backward()
    assert layer.weight.grad.eq(0).all()


def test_onednn_is_what_runs_and_only_for_the_wanted_gradients(onednn):
    def ran(layer, x):
        names = operators(lambda: layer(x).square().sum().backward())
        return names.count(ONEDNN), sum(name.endswith("::mm") for name in names)

    layer, x = Linear(8, 4), random(3, 8)
    assert ran(layer, x) == (1 + onednn.of_weight, 1 - onednn.of_weight)
    assert ran(layer, x.requires_grad_()) == (2 + onednn.of_weight, 1 - onednn.of_weight)
    layer.weight.requires_grad_(False)
    assert ran(layer, x) == (2, 0)
    with torch.no_grad():
        assert torch.equal(layer(x), product(x, layer.weight)) and not layer(x).requires_grad


class Spread(torch.Tensor):
    """As tensors that are spread over ranks have a class of their own."""


@pytest.mark.parametrize("change", [
    torch.Tensor.double, torch.Tensor.bfloat16, lambda x: x.as_subclass(Spread), lambda x: x.to("meta")])
def test_other_dtypes_and_kinds_of_tensors_stay_with_torch(change):
    x, weight = random(3, 8), random(4, 8)
    assert ONEDNN in operators(lambda: product(x, torch.nn.Parameter(weight)))
    assert ONEDNN not in operators(lambda: product(change(x), change(weight)))
    assert Linear(8, 4).to(change(x).dtype).to(change(x).device)(change(x)).shape == (3, 4)


def test_compiled_whole_and_equal():
    layer, x = Linear(8, 4), random(3, 8).requires_grad_()
    actual, expected = (torch.autograd.grad(call(x).square().sum(), (x, layer.weight)) for call in (
        torch.compile(layer, backend="aot_eager", fullgraph=True), layer))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 5, 64])
def test_weight_gradients_add_up(rows):
    gradient, x, total = random(rows, 6), random(rows, 16, seed=1), random(6, 16, seed=2)
    expected = total.double() + gradient.double().T @ x.double()
    add_weight_gradient(total, gradient, x)
    assert close(total, expected)
