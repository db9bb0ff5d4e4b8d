"""What is set for the same bits at every start, and what a log says of it. What comes of it on a GPU needs one."""

import os
from types import SimpleNamespace

import pytest
import torch
import torch._inductor.config as inductor

from drover.pipeline.config.training import TrainConfig
from drover.pipeline.config.tree import Config
from drover.pipeline.core.errors import UserError
from drover.pipeline.training import set_up
from drover.pipeline.training.device import VARIABLES, make_deterministic
from tests.refusal import refused


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
    assert VARIABLES.items() <= os.environ.items()
    assert getattr(inductor, "deterministic", True)


def test_own_choices_stay(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    monkeypatch.setenv("NCCL_ALGO", "allreduce:tree")
    make_deterministic()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8" and os.environ["NCCL_ALGO"] == "allreduce:tree"


def test_training_makes_it_so_before_it_touches_a_device(monkeypatch):
    def refuse(*_):
        raise UserError(f"deterministic: {torch.are_deterministic_algorithms_enabled()}")
    monkeypatch.setattr(set_up, "start_ranks", refuse)
    config = Config(train=TrainConfig(deterministic=True))
    refused(UserError, "deterministic: True", set_up.set_up, SimpleNamespace(config=config, store=None), None, None)
