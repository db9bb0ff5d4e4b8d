"""Products by oneDNN against torch's own: the same numbers to rounding, in every place where a layer may stand."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import model.linear
from model.kernels import ByOnednn
from model.linear import Linear, add_weight_gradient, product, weight_gradient

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch is without oneDNN")


@pytest.fixture(autouse=True, params=[ByOnednn(True, True), ByOnednn(True, False)], ids=["all", "with the weight"])
def onednn(monkeypatch, request):
    """As on processors where it is the faster one: it gives right results on any."""
    monkeypatch.setattr(model.linear, "by_onednn", lambda: request.param)
    return request.param


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def close(actual: torch.Tensor, exact: torch.Tensor) -> bool:
    """Within float32's rounding of a sum of up to 64 products, some of which cancel."""
    return bool((actual.double() - exact).abs().max() <= 3e-6 * max(1.0, exact.abs().max().item()))


def operators(action) -> list[str]:
    """Names of what `action` runs."""
    names = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            names.append(function.name())
            return function(*args, **(kwargs or {}))

    with Recorder():
        action()
    return names


@pytest.mark.parametrize("shape", [(7,), (1,), (64,), (2, 5), (1, 1), (3, 1, 4)])
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (1, 9), (9, 1), (48, 16), (17, 33)])
def test_values_and_gradients(shape, inputs, outputs):
    layer, x = Linear(inputs, outputs), random(*shape, inputs).requires_grad_()
    upstream = random(*shape, outputs, seed=1)
    out = layer(x)
    actual = torch.autograd.grad(out, (x, layer.weight), upstream)
    exact_x, exact_weight = (tensor.detach().double().requires_grad_() for tensor in (x, layer.weight))
    exact = F.linear(exact_x, exact_weight)
    expected = torch.autograd.grad(exact, (exact_x, exact_weight), upstream.double())
    assert out.shape == exact.shape and close(out, exact.detach())
    for gradient, golden in zip(actual, expected, strict=True):
        assert gradient.shape == golden.shape and close(gradient, golden)


def test_onednn_is_what_runs_forward_and_backward(onednn):
    layer, x = Linear(8, 4), random(3, 8).requires_grad_()
    names = operators(lambda: layer(x).square().sum().backward())
    assert names.count("mkldnn::_linear_pointwise") == 2 + onednn.of_weight
    assert sum(name.endswith("::mm") for name in names) == 1 - onednn.of_weight


def test_gradients_that_are_one_number_expanded_or_lie_across():
    layer, x = Linear(8, 4), random(5, 8).requires_grad_()
    for last in (torch.Tensor.sum, lambda out: (out.T.contiguous().T * 2).sum(), lambda out: out[:, ::2].sum()):
        actual = torch.autograd.grad(last(layer(x)), (x, layer.weight))
        expected = torch.autograd.grad(last(x @ layer.weight.T), (x, layer.weight))
        assert all(close(a, b.double()) for a, b in zip(actual, expected, strict=True))


def test_inputs_that_are_views():
    weight = random(6, 16)
    wide = random(10, 32, seed=1)
    for x in (wide[:, ::2], wide[:, 16:], random(16, 10).T, random(1, 16).expand(10, 16)):
        assert close(product(x, weight), x.double() @ weight.double().T)
        layer = Linear(16, 6)
        (actual,) = torch.autograd.grad(layer(x).square().sum(), layer.weight)
        (expected,) = torch.autograd.grad((x @ layer.weight.T).square().sum(), layer.weight)
        assert torch.allclose(actual, expected, rtol=1e-5, atol=1e-5)


def test_no_rows():
    layer = Linear(8, 4)
    out = layer(torch.empty(0, 8, requires_grad=True))
    assert out.shape == (0, 4)
    out.sum().backward()
    assert layer.weight.grad.eq(0).all()


def test_only_the_wanted_gradients(onednn):
    layer, x = Linear(8, 4), random(3, 8)
    assert operators(lambda: layer(x).sum().backward()).count("mkldnn::_linear_pointwise") == 1 + onednn.of_weight
    layer.weight.requires_grad_(False)
    x.requires_grad_()
    assert operators(lambda: layer(x).sum().backward()).count("mkldnn::_linear_pointwise") == 2
    assert layer.weight.grad.shape == (4, 8) and x.grad.shape == (3, 8)
    with torch.no_grad():
        assert torch.equal(layer(x), product(x, layer.weight)) and not layer(x).requires_grad
    with torch.inference_mode():
        assert layer(x).shape == (3, 4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_stay_with_torch_bit_for_bit(dtype):
    layer, x = Linear(8, 4).to(dtype), random(3, 8).to(dtype)
    assert "mkldnn::_linear_pointwise" not in operators(lambda: layer(x.clone().requires_grad_()).sum().backward())
    assert torch.equal(layer(x), F.linear(x, layer.weight))


def test_gradcheck_of_the_formulas():
    x, weight = random(2, 4, 5).double().requires_grad_(), random(3, 5, seed=1).double().requires_grad_()
    assert torch.autograd.gradcheck(model.linear._Linear.apply, (x, weight))


def test_kinds_of_tensors_that_stay_with_torch():
    class Spread(torch.Tensor):
        pass

    def asked(x: torch.Tensor, weight: torch.Tensor) -> bool:
        return "mkldnn::_linear_pointwise" in operators(lambda: product(x, weight))

    x, weight = random(3, 8), random(4, 8)
    assert asked(x, weight) and asked(x, torch.nn.Parameter(weight))
    assert not asked(x.as_subclass(Spread), weight) and not asked(x, weight.as_subclass(Spread))
    assert not asked(x.to("meta"), weight.to("meta"))
    assert Linear(8, 4).to("meta")(x.to("meta")).shape == (3, 4)


def test_compiled_whole_and_equal():
    layer, x = Linear(8, 4), random(3, 8).requires_grad_()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    actual = torch.autograd.grad(compiled(x).square().sum(), (x, layer.weight))
    expected = torch.autograd.grad(layer(x).square().sum(), (x, layer.weight))
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(actual, expected, strict=True))


def test_recomputing_is_bit_equal():
    layer, x = Linear(48, 48), random(16, 48).requires_grad_()
    kept = torch.autograd.grad(layer(F.silu(layer(x))).sum(), (x, layer.weight))
    again = torch.autograd.grad(
        checkpoint(lambda x: layer(F.silu(layer(x))), x, use_reentrant=False).sum(), (x, layer.weight)
    )
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))


@pytest.mark.parametrize("rows", [1, 5, 64])
def test_weight_gradients_alone_and_added_up(rows):
    gradient, x, total = random(rows, 6), random(rows, 16, seed=1), random(6, 16, seed=2)
    exact = gradient.double().T @ x.double()
    assert close(weight_gradient(gradient, x), exact)
    expected = total.double() + exact
    add_weight_gradient(total, gradient, x)
    assert close(total, expected)


def test_the_total_of_half_precision_gradients_is_wide():
    gradient, x, total = random(5, 6).bfloat16(), random(5, 16).bfloat16(), torch.full((6, 16), 256.0)
    add_weight_gradient(total, gradient, x)
    assert total.dtype == torch.float32 and not torch.equal(total, total.bfloat16().float())
