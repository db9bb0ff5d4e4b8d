"""`precision: auto`: bf16 only where the hardware multiplies it fast."""

from unittest.mock import Mock

import pytest
import torch

from drover.pipeline.training.checkpoints import agreed_precision
from drover.pipeline.training.device import choose_precision

CPU = torch.device("cpu")



@pytest.mark.parametrize(("amx", "avx512", "vendor", "expected"), [
    (True, True, "GenuineIntel", "bf16"), (False, True, "AuthenticAMD", "bf16"),
    (False, True, "GenuineIntel", "fp32"), (None, None, "AuthenticAMD", "fp32: no fast bf16 here")])
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


def test_auto_stays_in_what_a_run_computed_in_before(ranks):
    assert agreed_precision("auto", "fp8", ranks)[0] == "fp8"
