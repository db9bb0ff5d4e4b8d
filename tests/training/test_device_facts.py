"""What is known of GPUs that are not there: by their names, and by what torch would tell of them."""

import pytest
import torch

from pipeline.training.device_facts import allocator_facts, peak_flops

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize(("name", "teraflops"), [
    ("NVIDIA H100 80GB HBM3", 989.5), ("NVIDIA B200", 2250), ("NVIDIA GB200", 2500), ("NVIDIA B300 SXM6 AC", 2250),
    ("AMD Instinct MI300X", 1307.4), ("NVIDIA GeForce RTX 4090", 165.2), ("NVIDIA H100 PCIe", None),
    ("NVIDIA H100 NVL", None), ("NVIDIA T4", None)])
def test_peaks_are_of_the_card_that_is_named_and_never_guessed(monkeypatch, name, teraflops):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(GPU) == (None if teraflops is None else pytest.approx(teraflops * 1e12))
    assert peak_flops(torch.device("cpu")) is None


def test_retries_of_the_allocator_are_told(monkeypatch):
    told = {"reserved_bytes.all.peak": 3_210_000_000, "num_alloc_retries": 2}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: told)
    assert allocator_facts(GPU) == {"memory_reserved_mb": 3210.0, "memory_retries": 2}
    assert allocator_facts(torch.device("cpu")) == {}
