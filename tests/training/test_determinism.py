"""What is set for the same bits at every start, and what a log says of it. What comes of it on a GPU needs one."""

import os
from types import SimpleNamespace

import pytest
import torch
import torch._inductor.config as inductor

from drover.pipeline.core.errors import UserError
from drover.pipeline.training import set_up
from drover.pipeline.training.determinism import is_deterministic, make_deterministic
from tests.refusal import refused

VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO", "NCCL_PROTO")


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


def test_kernels_and_orders_of_sums_are_fixed():
    make_deterministic()
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled(), "attention would keep its faster backward pass"
    assert torch.backends.cudnn.deterministic and not torch.backends.cudnn.benchmark
    assert not torch.utils.deterministic.fill_uninitialized_memory
    assert {name: os.environ[name] for name in VARIABLES} == {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}
    assert getattr(inductor, "deterministic", True)


def test_own_choices_stay_and_one_that_cannot_be_is_refused(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    monkeypatch.setenv("NCCL_ALGO", "allreduce:tree")
    make_deterministic()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8" and os.environ["NCCL_ALGO"] == "allreduce:tree"
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    refused(UserError, r"CUBLAS_WORKSPACE_CONFIG is ':0:0'.*Unset it, or set it to :4096:8", make_deterministic)


def test_training_asks_for_it_before_it_touches_a_device(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    monkeypatch.setattr(set_up, "start_ranks", lambda patience: pytest.fail("the device was there first"))
    config = SimpleNamespace(train=SimpleNamespace(deterministic=True))
    refused(UserError, "CUBLAS_WORKSPACE_CONFIG", set_up.set_up, SimpleNamespace(config=config), None, None)


def test_a_cpu_always_is_and_a_gpu_where_it_is_asked_to_be():
    assert [is_deterministic(torch.device(device), asked) for device in ("cpu", "cuda") for asked in (False, True)] == [
        True, True, False, True]
