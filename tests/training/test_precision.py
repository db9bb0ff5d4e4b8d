"""`precision: auto`: bf16 only where the hardware multiplies it fast."""

import pytest
import torch

from pipeline.training.precision import DTYPES, choose_precision

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("wanted", DTYPES)
def test_what_is_asked_for_is_taken(wanted):
    assert choose_precision(wanted, CPU) == choose_precision(wanted, GPU) == (wanted, f"{wanted} as configured")


@pytest.mark.parametrize(("amx", "avx512", "expected"), [
    (True, False, "bf16"), (False, True, "bf16"), (False, False, "fp32")])
def test_on_cpus_by_their_instructions(monkeypatch, amx, avx512, expected):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx, raising=False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512, raising=False)
    assert choose_precision("auto", CPU)[0] == expected


def test_a_torch_without_these_queries_is_taken_for_slow(monkeypatch):
    for query in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"):
        monkeypatch.delattr(torch.cpu, query, raising=False)
    assert choose_precision("auto", CPU) == ("fp32", "fp32: no fast bf16 here")


@pytest.mark.parametrize(("supported", "expected"), [(True, "bf16"), (False, "fp32")])
def test_on_gpus_only_bf16_that_is_not_emulated_counts(monkeypatch, supported, expected):
    asked = []
    monkeypatch.setattr(torch.cuda, "is_bf16_supported",
                        lambda including_emulation=True: asked.append(including_emulation) or supported)
    assert choose_precision("auto", GPU)[0] == expected and asked == [False]
