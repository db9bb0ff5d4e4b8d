"""Where Llama's descendants differ, each off by default: QK-norm, sliding windows, layers without rotary embedding."""

from typing import ClassVar

import torch

from drover.model.attention.backend import Backend, Where
from drover.model.attention.choosing import choose
from drover.model.attention.sdpa import Sdpa
from tests.model.test_backends import CONFIG
from tests.refusal import refused
from tests.tiny_models import DESCENDANT

CPU = torch.device("cpu")


def test_a_backend_that_knows_no_window_is_not_taken_for_one():
    windowed = Where(CPU, torch.float32, compiled=False, head_dim=8, windowed=True)
    refused(ValueError, r"knows no sliding window\. Take auto, which is by_document here", choose,
            "tests.model.test_descendants:Ignorant", windowed)
    assert choose("auto", windowed).backend.windows and Backend.windows is False


class Ignorant(Sdpa):
    """Of windows."""

    windows: ClassVar[bool] = False


def test_layers_have_windows_and_rotation_by_their_intervals():
    config = CONFIG.model_copy(update={"layers": 6, **DESCENDANT})
    assert config.layer_kinds == [(7, True), (7, False), (None, True), (7, False), (7, True), (None, False)]


def test_a_window_takes_from_attentions_operations():
    plain, windowed = (CONFIG.model_copy(update={"layers": 4, **changes}) for changes in (
        {}, {"sliding_window": 8, "full_attention_interval": 4}))
    for causal, full, part in ((False, 32.0, 8.0), (True, 16.0, 7.0)):  # causal: 8 - 8 * 8 / 64
        assert plain.flops_per_token(32, causal) - windowed.flops_per_token(32, causal) == 12 * 48 * 3 * (full - part)
        assert plain.flops_per_token(8, causal) == windowed.flops_per_token(8, causal)
