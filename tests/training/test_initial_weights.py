"""Starting from somebody's weights: the same rectangles, rows of a grown vocabulary, other models and tokenizers."""

import copy
import json
import random
import re

import pytest
import torch

from drover.model.config import ModelConfig, RopeScaling
from drover.model.llama import Llama, initialise
from drover.pipeline.core.errors import UserError
from drover.pipeline.formats.weights import open_weights
from drover.pipeline.parallel.initial_values import drawn
from drover.pipeline.training.initial_weights import (
    changes,
    refuse_other_shape,
    refuse_other_tokenizer,
    taken,
    tokenizer_of,
)
from tests.formats.cutting import part_of, rectangle
from tests.formats.exporting import write_model
from tests.refusal import refused

SHAPE = ModelConfig(dim=32, layers=2, heads=4, kv_heads=2, ffn_dim=48, vocab_size=70, context_length=64)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    model = Llama(SHAPE)
    initialise(model, SHAPE, seed=5)
    write_model(folder, model, dtype=torch.float32, bos_id=1, eos_id=2)
    return folder, model


def test_every_rectangle_is_taken_and_only_new_rows_are_drawn(exported):
    folder, model = exported
    grown = SHAPE.model_copy(update={"vocab_size": 90})
    fresh, chance = drawn(grown, 8), random.Random(0)
    with open_weights(folder) as weights:
        values = taken(weights, fresh)
        for name, parameter in Llama(grown).named_parameters():
            shape = tuple(parameter.shape)
            everything = (0,) * len(shape), shape
            expected, old = fresh(name, shape, *everything).clone(), model.get_parameter(name)
            expected[:len(old)] = old.detach()
            assert (len(old) < shape[0]) == (shape[0] == 90)
            for part in (everything, *(rectangle(shape, chance) for _ in range(20))):
                assert torch.equal(values(name, shape, *part), part_of(expected, *part)), (name, part)


def test_values_that_are_no_numbers_are_refused_by_the_tensors_name(exported, tmp_path):
    model = copy.deepcopy(exported[1])
    model.layers[1].feed_forward.w2.weight.data[3, 4] = float("nan")
    write_model(tmp_path, model, dtype=torch.float32, bos_id=1, eos_id=2)
    with open_weights(tmp_path) as weights:
        values = taken(weights, drawn(SHAPE, 8))
        values("layers.1.feed_forward.w2.weight", (32, 48), (4, 0), (28, 48))
        refused(UserError, r"model.layers.1.mlp.down_proj.weight in .* has NaN or infinite values", values,
                "layers.1.feed_forward.w2.weight", (32, 48), (0, 0), (4, 48))


@pytest.mark.parametrize(("change", "said"), [
    ({"dim": 64}, "dim is 64 here, 32 there"),
    ({"ffn_dim": 80}, "ffn_dim is 80 here, 48 there"),
    ({"layers": 3, "kv_heads": 4}, "layers is 3 here, 2 there\n  - kv_heads is 4 here, 2 there"),
    ({"tied_embeddings": True}, "tied_embeddings is True here, False there"),
    ({"vocab_size": 69}, "vocab_size is 69 here, 70 there: it may only grow"),
])
def test_another_model_is_refused_with_all_that_differs(exported, change, said):
    refused(UserError, said, refuse_other_shape, exported[0], SHAPE.model_copy(update=change))


def test_positions_may_be_changed_and_the_vocabulary_grow_which_is_said(exported):
    scaling = RopeScaling(factor=8, original_context_length=64)
    extended = SHAPE.model_copy(update={"context_length": 512, "rope_theta": 1e6, "rope_scaling": scaling,
                                        "vocab_size": 1080})
    refuse_other_shape(exported[0], extended)
    refuse_other_shape(exported[0], SHAPE.model_copy(update={"vocab_size": None}))
    with open_weights(exported[0]) as weights:
        found = changes(weights.config, extended)
        assert changes(weights.config, SHAPE) == []
    assert [text.split(" -> ")[0] for text in found] == [
        "context_length 64", "rope_theta 500000.0", "rope_scaling None",
        "1,010 new rows of the vocabulary, initialised as in a new model"]


NEW = [(4, "<s>"), (5, "<new>")]


def tokenizer(folder, vocabulary=None, merges=("a b",), added=NEW[:1]):
    folder.mkdir(parents=True, exist_ok=True)
    model = {"type": "BPE", "vocab": vocabulary or {"a": 0, "b": 1, "ab": 2, "ba": 3}, "merges": list(merges)}
    if isinstance(vocabulary, list):
        model = {"type": "Unigram", "vocab": vocabulary, "unk_id": None}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    (folder / "tokenizer.json").write_text(json.dumps({
        "model": model, "added_tokens": [{"id": index, "content": text, **flags} for index, text in added]}))
    return folder


UNIGRAM = {"vocabulary": [["a", -1.0], ["b", -2.0]]}


@pytest.mark.parametrize(("theirs", "ours", "said"), [
    ({}, {"merges": [["a", "b"]]}, "the same 5 tokens"), ({}, {"added": NEW}, "the same 5 tokens"),
    (UNIGRAM, UNIGRAM, "the same tokenizer"), (UNIGRAM, UNIGRAM | {"added": NEW}, "the same 3 tokens"),
    ({"added": NEW}, {}, UserError(r"(?s)id 5 is '<new>' there, None here.*tokenizer.path=.*theirs")),
    ({}, {"vocabulary": {"b": 0, "a": 1, "ab": 2, "ba": 3}},
     UserError(r"(?s)id 0 is 'a' there, 'b' here.*id 1 is 'b' there, 'a' here")),
    ({}, {"merges": ["b a"]}, UserError("not how text is split"))])
def test_the_tokenizer_must_be_theirs_and_may_know_more(tmp_path, theirs, ours, said):
    folders = tokenizer(tmp_path / "theirs", **theirs), tokenizer(tmp_path / "ours", **ours)
    if isinstance(said, str):
        assert refuse_other_tokenizer(*folders) == said
        return
    refused(UserError, str(said), refuse_other_tokenizer, *folders)


@pytest.mark.parametrize(("kind", "file", "taken"), [
    ("sentencepiece", "tokenizer.model", "sentencepiece {}/tokenizer"),
    ("tiktoken", "tokenizer.model", "tiktoken {}/tokenizer"),
    ("huggingface", "tokenizer.json", "huggingface {}/tokenizer/hf/tokenizer.json"),
    ("char", "characters.json", "huggingface {}/tokenizer/hf/tokenizer.json")])
def test_the_tokenizer_of_a_run_is_offered_as_the_file_that_its_export_keeps(tmp_path, kind, file, taken):
    (tmp_path / "config.yaml").write_text("name: run\n")
    tokenizer(tmp_path / "tokenizer/hf", added=NEW)
    (tmp_path / "tokenizer/vocabulary.json").write_text(json.dumps({
        "format": 1, "kind": kind, "size": 6, "used": 6, "bos_id": 4, "eos_id": 5, "unk_id": None, "file": file,
        "sha256": "", "special_tokens": {"<s>": 4, "<new>": 5}}))
    settings = "tokenizer.kind={} tokenizer.path={}".format(*taken.format(tmp_path).split())
    refused(UserError, f"Take theirs: {re.escape(settings)}, from", refuse_other_tokenizer, tmp_path,
            tokenizer(tmp_path / "ours"))


def test_a_tokenizer_that_cannot_be_read_is_refused_and_one_that_is_not_there_is_said(tmp_path):
    same, torn = tokenizer(tmp_path / "same"), tmp_path / "torn"
    torn.mkdir()
    assert "no tokenizer.json there" in refuse_other_tokenizer(torn, same)
    for text in ("{", "[" * 5000):
        (torn / "tokenizer.json").write_text(text)
        refused(UserError, "cannot be compared", refuse_other_tokenizer, torn, same)


def test_a_checkpoint_of_a_run_has_the_runs_tokenizer(tmp_path):
    checkpoint = tmp_path / "train/checkpoints/step-00000001"
    checkpoint.mkdir(parents=True)
    hf = tokenizer(tmp_path / "tokenizer/hf")
    assert tokenizer_of(checkpoint) is None
    (tmp_path / "config.yaml").write_text("name: run\n")
    assert tokenizer_of(checkpoint) == tokenizer_of(tmp_path) == hf / "tokenizer.json"
