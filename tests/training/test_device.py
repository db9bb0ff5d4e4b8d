"""The precision that a device gets, settings for equal bits, and what is known of GPUs that are not there."""

import os
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch._inductor.config as inductor

from drover.pipeline.core.errors import UserError
from drover.pipeline.training.device import (
    VARIABLES,
    choose_precision,
    make_deterministic,
    memory_explained,
    peak_flops,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize(("amx", "avx512", "vendor", "expected"), [
    (True, True, "GenuineIntel", "bf16"), (False, True, "GenuineIntel", "fp32"),
    (None, None, "AuthenticAMD", "fp32: no fast bf16 here")])
def test_on_cpus_by_their_instructions(monkeypatch, amx, avx512, vendor, expected):
    """AVX512-BF16 is slow on Intel. A torch that cannot be asked is taken for slow."""
    for query, supported in (("_is_amx_tile_supported", amx), ("_is_avx512_bf16_supported", avx512)):
        monkeypatch.setattr(torch.cpu, query, Mock(return_value=supported), raising=False)
        if supported is None:
            monkeypatch.delattr(torch.cpu, query)
    monkeypatch.setattr("drover.pipeline.training.device.vendor", lambda: vendor)
    assert expected in choose_precision("auto", CPU)


@pytest.mark.parametrize(("supported", "expected"), [(True, "bf16"), (False, "fp32")])
def test_on_gpus_only_bf16_that_is_not_emulated_counts(monkeypatch, supported, expected):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", query := Mock(return_value=supported))
    assert choose_precision("auto", torch.device("cuda"))[0] == expected
    query.assert_called_with(including_emulation=False)


@pytest.fixture(autouse=True)
def untouched(monkeypatch):
    """The process as before: it has other tests."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # so that it is put back, whatever is set meanwhile
        monkeypatch.delenv(name)
    cudnn = torch.backends.cudnn
    for owner, name in ((cudnn, "deterministic"), (cudnn, "benchmark"), (inductor, "deterministic"),
                        (torch.utils.deterministic, "fill_uninitialized_memory")):
        if hasattr(owner, name):
            monkeypatch.setattr(owner, name, getattr(owner, name))
    yield
    torch.use_deterministic_algorithms(False)


def test_kernels_and_orders_of_sums_are_fixed(monkeypatch):
    monkeypatch.setenv("NCCL_ALGO", "allreduce:tree")
    make_deterministic()
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled(), "attention would keep its faster backward pass"
    assert torch.backends.cudnn.deterministic and not torch.backends.cudnn.benchmark
    assert not torch.utils.deterministic.fill_uninitialized_memory
    assert (VARIABLES | {"NCCL_ALGO": "allreduce:tree"}).items() <= os.environ.items(), "own choices stay"
    assert getattr(inductor, "deterministic", True)


GPU = torch.device("cuda", 0)


@pytest.mark.parametrize(("name", "teraflops"), [
    ("NVIDIA H100 80GB HBM3", 989.5), ("NVIDIA GeForce RTX 4090", 165.2), ("NVIDIA H100 PCIe", None),
    ("NVIDIA T4", None)])
def test_peaks_are_of_the_card_that_is_named_and_never_guessed(monkeypatch, name, teraflops):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(GPU) == (None if teraflops is None else pytest.approx(teraflops * 1e12))


def test_want_of_memory_while_a_model_is_placed_ends_the_job():
    ranks = SimpleNamespace(rank=3, world=16, device=torch.device("cpu"))
    expected = (r"did not suffice for weights and the optimizer's states, before the first step \(no room\). For "
                r"memory by kind .* c.yaml --ranks 16 --memory <GB of a GPU>")
    with pytest.raises(UserError, match=expected), memory_explained(None, ranks, 0, "c.yaml", first=True):
        raise torch.OutOfMemoryError("no room")
