"""Starting from somebody's weights: the same rectangles, rows of a grown vocabulary, other models and tokenizers."""

import copy
import json
import random
import re
import shutil

import pytest
import torch

from drover.launch.checks import _refuse_other_weights
from drover.model.config import ModelConfig, RopeScaling
from drover.model.llama import Llama, initialise
from drover.pipeline.contract.run import run_in
from drover.pipeline.core.errors import UserError
from drover.pipeline.formats.comparison import compare_folder
from drover.pipeline.formats.weights import open_weights
from drover.pipeline.parallel.fsdp import drawn
from drover.pipeline.tokenization.conversion import open_tokenizer, write_hugging_face
from drover.pipeline.training.initial_weights import (
    FREE,
    changes,
    refuse_other_shape,
    refuse_other_tokenizer,
    taken,
    tokenizer_of,
)
from tests.formats.cutting import part_of, rectangle
from tests.formats.exporting import write_model
from tests.refusal import refused
from tests.tiny_models import TOKENIZER_OF_BYTES, for_tokenizer, write_run
from tests.tokenization.conftest import rank_lines

SHAPE = ModelConfig(dim=32, layers=2, heads=4, kv_heads=2, ffn_dim=48, vocab_size=70, context_length=64)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    model = Llama(SHAPE)
    initialise(model, SHAPE, seed=5)
    write_model(folder, model)
    return folder, model


def test_every_rectangle_is_taken_and_only_new_rows_are_drawn(exported):
    folder, model = exported
    grown = SHAPE.model_copy(update={"vocab_size": 90})
    fresh = drawn(grown, 8)
    chance = random.Random(0)
    with open_weights(folder) as weights:
        values = taken(weights, fresh)
        for name, parameter in Llama(grown).named_parameters():
            shape = tuple(parameter.shape)
            everything = (0,) * len(shape), shape
            expected = fresh(name, shape, *everything).clone()
            old = model.get_parameter(name)
            expected[:len(old)] = old.detach()
            assert (len(old) < shape[0]) == (shape[0] == 90)
            for part in (everything, *(rectangle(shape, chance) for _ in range(20))):
                assert torch.equal(values(name, shape, *part), part_of(expected, *part)), (name, part)


def test_values_that_are_no_numbers_are_refused_by_the_tensors_name(exported, tmp_path):
    model = copy.deepcopy(exported[1])
    model.layers[1].feed_forward.w2.weight.data[3, 4] = float("nan")
    write_model(tmp_path, model)
    with open_weights(tmp_path) as weights:
        values = taken(weights, drawn(SHAPE, 8))
        values("layers.1.feed_forward.w2.weight", (32, 48), (4, 0), (28, 48))
        refused(UserError, r"model.layers.1.mlp.down_proj.weight in .* has NaN or infinite values", values,
                "layers.1.feed_forward.w2.weight", (32, 48), (0, 0), (4, 48))


EVERY = SHAPE.model_copy(update={"layers": 4, "head_dim": 16})


@pytest.mark.parametrize("name", sorted(ModelConfig.model_fields.keys() - {*FREE, "ffn_dim_multiplier", "multiple_of"}))
def test_every_field_of_a_network_is_compared(name, tmp_path):
    """Also one that comes later: fields are taken from the class."""
    write_model(tmp_path, Llama(EVERY))
    value = getattr(EVERY, name)
    other = EVERY.model_copy(update={name: not value if isinstance(value, bool) else value + 1})
    refused(UserError, rf"(?m)^(  - )?{name} is .* here, .* there", refuse_other_shape, tmp_path, other)
    refused(UserError, rf"(?<!_){name} is .*; trained with", compare_folder, tmp_path, other, None)


def test_two_ways_to_say_one_network_are_equal():
    rule = SHAPE.model_copy(update={"ffn_dim": None, "ffn_dim_multiplier": 0.5, "multiple_of": 16})
    same = {"head_dim": 8, "ffn_dim": rule.hidden, "multiple_of": 256}
    assert rule.differences(rule.model_copy(update=same)) == {}
    assert rule.differences(rule.model_copy(update={"multiple_of": 256})) == {"ffn_dim": (rule.hidden, 256)}


def test_positions_may_be_changed_and_the_vocabulary_may_only_grow(exported):
    scaling = RopeScaling(factor=8, original_context_length=64)
    extended = SHAPE.model_copy(update={"context_length": 512, "rope_theta": 1e6, "rope_scaling": scaling,
                                        "vocab_size": 1080})
    refuse_other_shape(exported[0], extended)
    refuse_other_shape(exported[0], SHAPE.model_copy(update={"vocab_size": None}))
    assert len(changes(SHAPE, extended)) == 4 and changes(SHAPE, SHAPE) == []
    refused(UserError, "vocab_size is 69 here, 70 there: it may only grow", refuse_other_shape, exported[0],
            SHAPE.model_copy(update={"vocab_size": 69}))


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
OTHER_SCORES = {"vocabulary": [["a", -2.0], ["b", -1.0]]}


@pytest.mark.parametrize(("theirs", "ours", "message"), [
    ({}, {"merges": [["a", "b"]]}, ""), ({}, {"added": NEW}, ""), (UNIGRAM, UNIGRAM | {"added": NEW}, ""),
    ({"added": NEW}, {}, r"(?s)id 5 is '<new>' there, None here.*tokenizer.path=.*theirs"),
    ({}, {"vocabulary": {"b": 0, "a": 1, "ab": 2, "ba": 3}}, "id 0 is 'a' there, 'b' here"),
    ({}, {"merges": ["b a"]}, "not how text is split"), (UNIGRAM, OTHER_SCORES, "not how text is split")])
def test_the_tokenizer_must_be_theirs_and_may_know_more(tmp_path, theirs, ours, message):
    given = tokenizer(tmp_path / "theirs", **theirs), tokenizer(tmp_path / "ours", **ours)
    if message:
        refused(UserError, message, refuse_other_tokenizer, *given)
    else:
        assert "the same" in refuse_other_tokenizer(*given)


@pytest.mark.parametrize(("kind", "file", "taken"), [
    ("sentencepiece", "tokenizer.model", "sentencepiece {}/tokenizer"),
    ("char", "characters.json", "huggingface {}/tokenizer/hf/tokenizer.json")])
def test_the_tokenizer_of_a_run_is_offered_as_the_file_that_its_export_keeps(tmp_path, kind, file, taken):
    (tmp_path / "config.yaml").write_text("name: run\n")
    tokenizer(tmp_path / "tokenizer/hf", added=NEW)
    (tmp_path / "tokenizer/vocabulary.json").write_text(json.dumps({
        "format": 1, "kind": kind, "size": 6, "used": 6, "bos_id": 4, "eos_id": 5, "unk_id": None, "file": file,
        "sha256": "", "special_tokens": {"<s>": 4, "<new>": 5}}))
    settings = "tokenizer.kind={} tokenizer.path={}".format(*taken.format(tmp_path).split())
    refused(UserError, f"Take theirs, .*: {re.escape(settings)}$", refuse_other_tokenizer, tmp_path,
            tokenizer(tmp_path / "ours"))


def test_a_tokenizer_that_cannot_be_read_is_refused_and_one_that_is_not_there_is_said(tmp_path):
    same = tokenizer(tmp_path / "same")
    torn = tmp_path / "torn"
    torn.mkdir()
    assert refuse_other_tokenizer(torn, same).startswith("warning: there is no tokenizer.json or tokenizer.model")
    for text in ("{", "[" * 5000):
        (torn / "tokenizer.json").write_text(text)
        refused(UserError, "cannot be compared", refuse_other_tokenizer, torn, same)


def test_the_tokenizer_of_a_run_is_found_in_the_run_that_it_reuses(tmp_path):
    """It was not compared at all: training read ids of one tokenizer with the embeddings of another."""
    model = for_tokenizer(TOKENIZER_OF_BYTES)
    runs = tmp_path / "runs"
    first = write_run(runs / "first", {}, TOKENIZER_OF_BYTES)
    hf = tokenizer(first / "tokenizer/hf")
    second = write_run(runs / "second", {1: model}, None, reuse=str(first))
    third = write_run(runs / "third", {1: model}, None, reuse=str(second))
    other = tokenizer(tmp_path / "other", merges=["b a"])
    for path in (first, second, third, third / "train/checkpoints/step-00000001"):
        assert tokenizer_of(path) == hf / "tokenizer.json"
        refused(UserError, "not how text is split", refuse_other_tokenizer, path, other)
    fresh = write_run(runs / "fresh", {}, TOKENIZER_OF_BYTES, model=model.config.model_dump(mode="json"))
    tokenizer(fresh / "tokenizer/hf", merges=["b a"])
    refused(UserError, "not how text is split", _refuse_other_weights, run_in(fresh), str(third))  # before it queues
    shutil.rmtree(first)
    assert "(convert/hf)" in refused(UserError, "tokenizer of the weights in .*third is not there",
                                     refuse_other_tokenizer, third, other)


def test_a_tokenizer_model_is_compared_too(tmp_path):
    """Some folders have no other. The names of special tokens are not in the file."""
    for folder, text in (("weights", "ab"), ("same", "ab"), ("other", "xy")):
        (tmp_path / folder).mkdir()
        model = tmp_path / folder / "tokenizer.model"
        model.write_bytes(rank_lines([*(bytes([value]) for value in range(256)), text.encode()]))
        write_hugging_face(open_tokenizer("tiktoken", model), model.parent)
    weights = tmp_path / "weights"
    (weights / "tokenizer.json").unlink()
    named = tmp_path / "same/tokenizer.json"
    named.write_text(named.read_text().replace("reserved_special_token_0", "named_later"))
    assert "the same" in refuse_other_tokenizer(weights, named.parent)
    refused(UserError, f"(?s)another tokenizer.*=tiktoken tokenizer.path={weights}/tokenizer.model",
            refuse_other_tokenizer, weights, tmp_path / "other")
