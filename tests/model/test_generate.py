"""What `generate` refuses. What it writes, with a cache or without, tests/model/generation compares with rows of a
batch, with full passes and with transformers."""

import pytest

from drover.model.config import ModelConfig
from drover.model.generate import generate
from tests.refusal import refused
from tests.tiny_models import opinionated


@pytest.mark.parametrize(("changes", "message"), [
    ({"prompts": [[1], []]}, "Prompt 1 is empty"), ({"max_new_tokens": -1}, "must be at least 0, not -1"),
    ({"top_k": 0}, "top_k")])
def test_refusals(changes, message):
    model = opinionated(ModelConfig(dim=16, layers=1, heads=2, kv_heads=1, vocab_size=50, context_length=32))
    refused(ValueError, message, generate, model, **{
        "prompts": [[1]], "max_new_tokens": 12, "temperature": 1.0, "top_p": 1.0, "seed": 0, "stop_ids": (), **changes})
