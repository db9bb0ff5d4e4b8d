"""What is known of GPUs that are not there: by their names, and by what torch would tell of them."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from drover.pipeline.core.errors import UserError
from drover.pipeline.training.device import allocator_facts, memory_explained, peak_flops, want_of_memory

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize(("name", "teraflops"), [
    ("NVIDIA H100 80GB HBM3", 989.5), ("NVIDIA GeForce RTX 4090", 165.2), ("NVIDIA H100 PCIe", None),
    ("NVIDIA GeForce RTX 4090 D", None), ("NVIDIA T4", None)])
def test_peaks_are_of_the_card_that_is_named_and_never_guessed(monkeypatch, name, teraflops):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(GPU) == (None if teraflops is None else pytest.approx(teraflops * 1e12))


def test_retries_of_the_allocator_are_told(monkeypatch):
    stats = {"reserved_bytes.all.peak": 3_210_000_000, "num_alloc_retries": 2}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    assert allocator_facts(GPU) == {"memory_reserved_mb": 3210.0, "memory_retries": 2}
    assert allocator_facts(torch.device("cpu")) == {}


def test_a_gpu_without_memory_is_explained_with_its_numbers(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1_000_000_000, 80_000_000_000))
    engine = Mock(**{"held.return_value": [
        ("layers.0.feed_forward.w1.weight", "model", Mock(nbytes=10**9, device=GPU)),
        ("layers.1.feed_forward.w2.weight", "exp_avg", Mock(nbytes=2 * 10**9, device=GPU)),
        ("output.weight", "model", Mock(nbytes=9 * 10**9, device=torch.device("cpu")))]})
    ranks = SimpleNamespace(rank=3, world=16, device=GPU)
    printed = want_of_memory(torch.OutOfMemoryError("CUDA out of memory."), engine, ranks, 7, "--config c.yaml")
    assert "layers.*.feed_forward 3 GB (1 GB of weights, 2 GB of optimizer's states). For" in printed
    assert "drover rehearse --config c.yaml --ranks 16 --memory 80" in printed
    assert "output" not in printed, "it is not on the GPU"


def test_want_of_memory_while_a_model_is_placed_ends_the_job():
    ranks = SimpleNamespace(rank=3, world=16, device=torch.device("cpu"))
    expected = (r"did not suffice for weights and the optimizer's states, before the first step \(no room\). For "
                r"memory by kind .* --config c.yaml --ranks 16 --memory <GB of a GPU>")
    with pytest.raises(UserError, match=expected), memory_explained(None, ranks, 0, "--config c.yaml", first=True):
        raise torch.OutOfMemoryError("no room")
