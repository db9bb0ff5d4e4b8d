"""Products by oneDNN against torch's own: the same numbers to rounding, in every place where a layer may stand; and
which library makes them: by what is known of the processor alone, and once, equal on every start."""

import pytest
import torch
import torch.nn.functional as F

from drover.model import linear
from drover.model.linear import FASTER, ByOnednn, Linear, add_weight_gradient, by_onednn, product, vendor
from tests.model.agreement import operators

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch is without oneDNN")
ONEDNN = "mkldnn::_linear_pointwise"


@pytest.fixture(params=[ByOnednn(True, True), ByOnednn(True, False)], ids=["all", "with the weight"])
def onednn(monkeypatch, request):
    """As on processors where it is the faster one: it gives right results on any."""
    monkeypatch.setattr(linear, "by_onednn", lambda: request.param)
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


@pytest.mark.parametrize("shape", [(7,), (1,), (2, 5), (3, 1, 4)])
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (1, 9), (9, 1), (17, 33)])
def test_values_and_gradients(onednn, shape, inputs, outputs):
    upstream = random(*shape, outputs, seed=1)
    assert as_exact(random(*shape, inputs), outputs, lambda out: (out * upstream).sum())


WIDE = random(10, 32, seed=1)


@pytest.mark.parametrize("x", [WIDE[:, ::2], random(16, 10).T, random(1, 16).expand(10, 16)])
@pytest.mark.parametrize("last", [
    torch.Tensor.sum, lambda out: (out.T.contiguous().T * 2).sum(), lambda out: out[:, ::2].sum()])
def test_inputs_that_are_views_and_gradients_that_are_one_number_expanded_or_lie_across(onednn, x, last):
    assert as_exact(x.detach(), 6, last)


def test_onednn_is_what_runs_and_only_for_the_wanted_gradients(onednn):
    def ran(layer, x):
        names = operators(lambda: layer(x).square().sum().backward())
        return names.count(ONEDNN), sum(name.endswith("::mm") for name in names)

    layer, x = Linear(8, 4), random(3, 8)
    assert ran(layer, x) == (1 + onednn.of_weight, 1 - onednn.of_weight)
    assert ran(layer, x.requires_grad_()) == (2 + onednn.of_weight, 1 - onednn.of_weight)
    layer.weight.requires_grad_(False)
    assert ran(layer, x) == (2, 0)


class Spread(torch.Tensor):
    """As tensors that are spread over ranks have a class of their own."""


@pytest.mark.parametrize("change", [torch.Tensor.double, lambda x: x.as_subclass(Spread), lambda x: x.to("meta")])
def test_other_dtypes_and_kinds_of_tensors_stay_with_torch(onednn, change):
    x, weight = random(3, 8), random(4, 8)
    assert ONEDNN in operators(lambda: product(x, torch.nn.Parameter(weight)))
    assert ONEDNN not in operators(lambda: product(change(x), change(weight)))


def test_compiled_and_equal(onednn):
    layer, x = Linear(8, 4), random(3, 8).requires_grad_()
    actual, expected = (torch.autograd.grad(call(x).square().sum(), (x, layer.weight)) for call in (
        torch.compile(layer, backend="aot_eager", fullgraph=True), layer))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_weight_gradients_add_up(onednn):
    gradient, x, total = random(5, 6), random(5, 16, seed=1), random(6, 16, seed=2)
    expected = total.double() + gradient.double().T @ x.double()
    add_weight_gradient(total, gradient, x)
    assert close(total, expected)


@pytest.mark.parametrize(("maker", "capability"), [*FASTER, ("GenuineIntel", "AVX512"), ("", "AVX2")])
def test_follows_the_table_and_what_was_not_measured_stays_with_torch(monkeypatch, maker, capability):
    monkeypatch.setattr(linear, "vendor", lambda: maker)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert by_onednn.__wrapped__() == FASTER.get((maker, capability), ByOnednn(False, False))
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    assert by_onednn.__wrapped__() == ByOnednn(False, False)


def test_the_vendor_as_linux_says_it(tmp_path):
    description = tmp_path / "cpuinfo"
    description.write_text("processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel\t\t: 1\n")
    assert vendor(description) == "AuthenticAMD"
    description.write_text("processor\t: 0\nBogoMIPS\t: 243.75\n")  # ARM
    assert vendor(description) == "" and vendor(tmp_path / "none") == ""
