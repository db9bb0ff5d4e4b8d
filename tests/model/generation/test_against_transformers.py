"""Greedy generation in float32 is that of transformers on the export, prompts of unequal length together."""

import pytest
import torch

from drover.model.generation.sampling import Sampling
from drover.pipeline.formats.weights import load_model, open_weights
from drover.pipeline.tokenization.conversion import byte_tokenizer
from tests.model.generation.test_stream import written
from tests.tiny_models import for_tokenizer, write_huggingface

TOKENIZER = byte_tokenizer()
PROMPTS = [[TOKENIZER.bos_id, *text.encode()] for text in ("def main():", "a", "Once upon a time, in a land", "12 34")]
NEW = 40


SHAPES = {"untied": {}, "tied": {"tied_embeddings": True},
          "Qwen3": {"qk_norm": True, "sliding_window": 9, "full_attention_interval": 2},
          "SmolLM3": {"no_rope_layer_interval": 2, "sliding_window": 9}}


@pytest.fixture(scope="module", params=SHAPES)
def both(request, tmp_path_factory):
    """Their model and ours, of the same folder."""
    from transformers import AutoModelForCausalLM
    folder = write_huggingface(tmp_path_factory.mktemp(request.param) / "hf", for_tokenizer(
        TOKENIZER, seed=4, **SHAPES[request.param]), TOKENIZER)
    with open_weights(folder) as weights:
        ours = load_model(weights, torch.device("cpu"), torch.float32)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), ours


@pytest.mark.parametrize("penalty", [0.9, 1.0, 1.15])
def test_greedy_tokens_are_equal(both, penalty):
    theirs, ours = both
    eos = TOKENIZER.eos_id
    expected = [theirs.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, eos_token_id=eos,
                                pad_token_id=eos, repetition_penalty=penalty)[0, len(prompt):].tolist()
                for prompt in PROMPTS]
    sampling = Sampling(max_tokens=NEW, repetition_penalty=penalty, stop_ids={eos})
    result = written(ours, PROMPTS, [sampling] * len(PROMPTS))
    assert [tokens + [eos] * (end == "stop") for tokens, end in result] == expected
    assert len(set(map(tuple, expected))) == len(PROMPTS)
