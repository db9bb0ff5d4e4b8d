"""Our model behind lm_eval's own; that its figures are those of transformers, test_named_tasks.py shows."""

import math
import re
import shutil
import tempfile
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from drover.model.config import ModelConfig
from drover.pipeline.core.files import read_json, write_json
from drover.pipeline.evaluation.harness import HarnessModel
from drover.pipeline.evaluation.open_model import OpenedModel, open_model
from drover.pipeline.evaluation.placing import Placed
from drover.pipeline.tokenization.conversion import byte_tokenizer, write_hugging_face
from tests.evaluation.task_pack import write_pack
from tests.tiny_models import for_tokenizer, write_huggingface

VOCABULARY = byte_tokenizer()


@cache
def tokenizer_folder():
    """VOCABULARY in Hugging Face's form. Removed when the process ends."""
    folder = tempfile.TemporaryDirectory()
    write_hugging_face(VOCABULARY, Path(folder.name))
    return folder


def harness(network, batch=4, **more):
    """A network behind the harness."""
    return HarnessModel(OpenedModel(Placed(network), VOCABULARY, Path(tokenizer_folder().name)), batch=batch, **more)


class Uniform(torch.nn.Module):
    """Finds each of the 256 bytes equally likely and nothing else possible."""

    def __init__(self):
        super().__init__()
        self.config = ModelConfig(vocab_size=VOCABULARY.size, context_length=32)
        self.unused = torch.nn.Parameter(torch.zeros(1))

    def forward(self, tokens):
        logits = torch.full((*tokens.shape, VOCABULARY.size), -torch.inf)
        logits[..., :256] = 0
        return logits


def requests(*arguments):
    return [SimpleNamespace(args=entry) for entry in arguments]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """An export, and the README's tasks with data by absolute paths, so that the harness finds it by itself."""
    folder = tmp_path_factory.mktemp("home")
    write_huggingface(folder / "hf", for_tokenizer(VOCABULARY, seed=7, context_length=512), VOCABULARY)
    for path in write_pack(folder / "tasks").glob("*.yaml"):
        path.write_text(re.sub(r"\w+\.jsonl", rf"{folder / 'tasks'}/\g<0>", path.read_text()))
    return folder


def opened(folder):
    return open_model(folder, torch.device("cpu"), torch.float32)


def test_rolling_is_exact_for_a_uniform_byte_model():
    texts = ["", "a", "x" * 32, "y" * 33, "größer" * 40]
    values = harness(Uniform()).loglikelihood_rolling(requests(*((text,) for text in texts)))
    for text, value in zip(texts, values, strict=True):
        assert value == pytest.approx(-math.log(2) * 8 * len(text.encode()), rel=1e-12)


def test_contexts_that_lose_their_beginning_are_counted():
    model = harness(for_tokenizer(VOCABULARY, context_length=16), batch=2)
    _, (short, _) = model.loglikelihood(requests(("0123456789" * 5, "abc"), ("x", "abc")))
    [(alone, _)] = model.loglikelihood(requests(("x", "abc")))
    assert model.truncated == 1 and short == pytest.approx(alone, abs=1e-4)
    model.generate_until(requests(("0123456789", {"until": []})))
    assert model.truncated == 2


@pytest.mark.parametrize(("context", "continuation", "before", "after"), [
    ("xa", "b", "xa", "b"), ("x ", "ab", "x", " \a")])
def test_a_token_across_the_cut_leaves_no_empty_answer(monkeypatch, context, continuation, before, after):
    """Bytes, but "ab" is one token where it stands: encoding a pair as one text moves the cut."""
    model = harness(for_tokenizer(VOCABULARY))
    monkeypatch.setattr(model, "tok_encode", lambda text, **_: [*text.replace("ab", "\a").encode()])
    assert model._encode_pair(context, continuation) == ([*before.encode()], [*after.encode()])


def test_texts_do_not_depend_on_the_batch(home):
    """Greedy and sampled: request i uses seed i, alone or among others, whatever their lengths."""
    wanted = requests(*(("a" * number, {"max_gen_toks": 9, "do_sample": number < 3, "temperature": 1.0})
                        for number in (1, 9, 2, 30, 4)))
    texts = [HarnessModel(opened(home / "hf"), batch=batch).generate_until(wanted) for batch in (1, 2, 5)]
    assert texts[0] == texts[1] == texts[2] and len(set(texts[0])) > 1


@pytest.mark.parametrize("where", [("generation_config.json",), ("config.json",), ("config.json", "nothing")])
def test_a_text_ends_at_every_id_that_the_model_names(home, tmp_path, where):
    """In generation_config.json, or in config.json, with or without other generation settings."""
    folder = shutil.copytree(home / "hf", tmp_path / "hf")
    wanted = requests(("import", {"max_gen_toks": 24, "until": []}))
    complete, = HarnessModel(opened(folder), batch=1).generate_until(wanted)
    end = next(character for character in complete[2:] if character.isascii())
    if where != ("generation_config.json",):
        (folder / "generation_config.json").unlink()
    if where[1:]:
        write_json(folder / "generation_config.json", {"temperature": 0.6})
    path = folder / where[0]
    write_json(path, {**read_json(path), "eos_token_id": [VOCABULARY.eos_id, *VOCABULARY.encode(end)]})
    assert HarnessModel(opened(folder), batch=1).generate_until(wanted) == [complete.partition(end)[0]]
