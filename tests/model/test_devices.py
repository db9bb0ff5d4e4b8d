"""Devices by name."""

import pytest
import torch

from drover.model.devices import automatic, exact, find_device
from tests.refusal import refused


def test_what_computes_where_nobody_says_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert find_device(automatic()) == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert automatic() == "cuda"


@pytest.mark.parametrize("name", ["gpu", "mps:1:2", "xpu:99"])
def test_a_device_that_is_not_there_is_refused(name):
    refused(ValueError, f"{name} cannot be used here", find_device, name)


@pytest.mark.parametrize(("device", "where"), [("cpu", "cpu"), ("cuda:1", "cuda:1"), ("mps", "cpu")])
def test_float64_is_computed_with_where_it_can_be(device, where):
    assert exact(torch.device(device)) == torch.device(where)
