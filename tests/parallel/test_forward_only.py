"""A model that no rank holds is called like one that each holds: equal to the last bit, whoever has what to do."""

import math

import pytest
import torch

from drover.model.config import ModelConfig
from drover.pipeline.evaluation.placing import fewest, needed
from tests.parallel.forward_only_calls import calls, one_fails
from tests.parallel.groups import run_case
from tests.tiny_models import TOKENIZER_OF_BYTES, for_tokenizer, write_huggingface


def written(folder, **changes):
    """A folder in Hugging Face's form with weights that make sharp choices."""
    model = for_tokenizer(TOKENIZER_OF_BYTES, layers=3, **changes)
    return str(write_huggingface(folder / "hf", model, TOKENIZER_OF_BYTES))


@pytest.mark.parametrize(("ranks", "dp_shard", "dtype", "changes"), [
    (2, 2, "float32", {}), (2, 2, "bfloat16", {"tied_embeddings": True}), (4, 2, "float32", {}),
    (4, 4, "float32", {"qk_norm": True, "sliding_window": 16, "full_attention_interval": 2})])
def test_shared_or_whole_the_model_computes_the_same(tmp_path, ranks, dp_shard, dtype, changes):
    """Logits of every shape, and texts with caches, from ranks that call it 0, 3 or 6 times."""
    assert sum(run_case(ranks, calls, folder=written(tmp_path, **changes), dp_shard=dp_shard, dtype=dtype)) > 5


def test_one_rank_fails_and_the_other_ends_its_work(tmp_path):
    assert run_case(2, one_fails, folder=written(tmp_path)) == [
        (4, None, False), (1, "a text that cannot be read", False)]


def test_as_few_ranks_as_the_memory_allows():
    config = ModelConfig(dim=256, layers=8, heads=4, kv_heads=2, ffn_dim=512, vocab_size=1024, context_length=64)
    size = 4 * config.parameter_count
    assert needed(config, torch.float32, 1) == size == 2 * needed(config, torch.bfloat16, 1)
    assert fewest(config, torch.float32, size, 8) == 1
    assert fewest(config, torch.float32, needed(config, torch.float32, 3), 6) == 3
    assert fewest(config, torch.float32, 1, 8) == 8, "nothing is enough: what takes least"
    # Two units that follow each other are whole on a rank, once more while they are gathered.
    unit = 1024 * 256
    layer = config.model_copy(update={"layers": 2}).parameter_count - config.model_copy(update={
        "layers": 1}).parameter_count
    assert needed(config, torch.float32, 2) == math.ceil(size / 2) + 2 * 4 * (layer + max(unit, layer))
