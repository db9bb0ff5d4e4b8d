"""What `train.attention` means to a run."""

from __future__ import annotations

import pytest
import torch

from drover.model.attention.backend import Where
from drover.pipeline.core.errors import UserError
from drover.pipeline.parallel import attention
from drover.pipeline.parallel.attention import KERNELS, OWN, choose_attention, choose_flash
from tests.refusal import refused, table

CPU = torch.device("cpu")


def test_what_cannot_be_had_is_said_to_the_user():
    refused(UserError, r"train.attention cannot be used here: attention 'varlen' needs a GPU, not", choose_attention,
            "varlen", Where(CPU, torch.float32, compiled=False, head_dim=32))


@pytest.mark.parametrize("name, capability, installed, taken", table(r"""
    auto -> 9 -> flash_attn_interface flash_attn.cute -> fa3
    auto -> 9 -> none -> own
    auto -> 10 -> flash_attn_interface flash_attn.cute -> own
    fa2 -> 9 -> flash_attn_interface -> own
    fa4 -> 10 -> flash_attn.cute -> fa4
    fa3 -> 9 -> none -> needs the module flash_attn_interface, which is not
    fa3 -> 10 -> flash_attn_interface -> is for compute capability 9\.x, not 10\.x
    fa4 -> 8 -> flash_attn.cute -> is for compute capability 9\.x and 10\.x, not 8\.x
    fa3 -> 0 -> none -> needs a GPU, not a cpu device
    auto -> 0 -> none -> own
    """, str, int, str.split))
def test_newer_flash_kernels_are_used_where_gpu_and_packages_allow(monkeypatch, name, capability, installed, taken):
    activated = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
    monkeypatch.setattr(KERNELS, "activate_flash_attention_impl", activated.append)
    monkeypatch.setattr(attention, "find_spec", lambda module: module if module in installed else None)
    device = torch.device("cuda", 0) if capability else CPU
    if " " in taken:
        refused(UserError, f"train.flash={name} cannot be used here: it {taken}", choose_flash, name, device)
    else:
        assert choose_flash(name, device) == (OWN if taken == "own" else taken)
    assert activated == ([taken.upper()] if taken in ("fa3", "fa4") else [])
