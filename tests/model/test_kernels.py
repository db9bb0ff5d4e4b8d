"""Which library makes products: by what is known of the processor alone, and once, equal on every start."""

import pytest
import torch

from drover.model import kernels
from drover.model.kernels import FASTER, ByOnednn, by_onednn, vendor


def choose(monkeypatch, vendor: str, capability: str) -> ByOnednn:
    monkeypatch.setattr(kernels, "vendor", lambda: vendor)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    return by_onednn.__wrapped__()


@pytest.mark.parametrize(("maker", "capability"), [
    *FASTER, ("GenuineIntel", "AVX512"), ("AuthenticAMD", "DEFAULT"), ("", "AVX2")])
def test_follows_the_table_and_what_was_not_measured_stays_with_torch(monkeypatch, maker, capability):
    assert choose(monkeypatch, maker, capability) == FASTER.get((maker, capability), ByOnednn(False, False))


def test_a_torch_without_the_operator(monkeypatch):
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    assert choose(monkeypatch, "AuthenticAMD", "AVX512") == ByOnednn(False, False)


def test_the_vendor_as_linux_says_it(tmp_path):
    description = tmp_path / "cpuinfo"
    description.write_text("processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel\t\t: 1\n")
    assert vendor(description) == "AuthenticAMD"
    description.write_text("processor\t: 0\nBogoMIPS\t: 243.75\n")  # ARM
    assert vendor(description) == "" and vendor(tmp_path / "none") == ""
