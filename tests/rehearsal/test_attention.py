"""Which attention is rehearsed for GPUs: that which would run there."""

import pytest
import torch

from drover.model.attention.backend import Where
from drover.model.attention.varlen import Varlen
from drover.pipeline.core.errors import UserError
from drover.pipeline.rehearsal.replacements import NAME, on_gpus
from tests.refusal import refused

CPU, BF16, FP32 = torch.device("cpu"), torch.bfloat16, torch.float32


class OnGpusOnly(Varlen):
    """Somebody's kernel."""

    def unsupported(self, where):
        """See Backend."""
        return "needs a GPU" if where.device.type == "cpu" else ""


@pytest.mark.parametrize("name, where, expected", [
    ("auto", Where(CPU, BF16, True, 128), NAME),
    ("auto", Where(CPU, FP32, False, 128), "by_document"),
    ("auto", Where(CPU, FP32, True, 128), NAME),  # in the place of flex
    ("auto", Where(CPU, FP32, True, 128, segmented=True), "sdpa"),
    ("auto", Where(CPU, BF16, False, 20), "by_document"),
    ("sdpa", Where(CPU, BF16, True, 128), "sdpa"),
    ("mine:Own", Where(CPU, BF16, True, 128), "mine:Own"),  # the engine says that there is none
    (f"{__name__}:OnGpusOnly", Where(CPU, BF16, True, 128), NAME),
    (f"{__name__}:OnGpusOnly", Where(CPU, FP32, False, 128), "by_document"),
])
def test_a_rehearsal_takes_what_gpus_would(name, where, expected):
    assert on_gpus(name, where)[0] == expected


def test_what_could_not_run_there_is_refused():
    refused(UserError, "needs bfloat16, not float32", on_gpus, "varlen", Where(CPU, FP32, False, 128))
    refused(UserError, "'by_document' cannot be compiled", on_gpus, "by_document", Where(CPU, BF16, True, 128))
    assert on_gpus("by_document", Where(CPU, BF16, False, 128)) == ("by_document", "")
