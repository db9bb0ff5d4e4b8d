"""Model and tokenizer of whatever a user points at, and what lacks one of them refused in a sentence."""

import shutil

import pytest
import torch

from drover.pipeline.core.errors import UserError
from drover.pipeline.evaluation.open_model import open_model, run_of
from drover.pipeline.tokenization.conversion import byte_tokenizer
from tests.refusal import refused
from tests.tiny_models import for_tokenizer, write_run

TOKENIZER = byte_tokenizer()
TEXT = "A text \u2581 of é, 漢 and <|end_of_text|>."


@pytest.fixture(scope="module")
def models():
    return {step: for_tokenizer(TOKENIZER, seed=step) for step in (2, 7)}


def opened(path, dtype=torch.float32):
    return open_model(path, torch.device("cpu"), dtype)


def is_model(result, model):
    tokens = torch.tensor([[TOKENIZER.bos_id, *TOKENIZER.encode(TEXT)]])
    assert torch.equal(result.model(tokens), model(tokens))
    assert result.tokenizer.encode(TEXT) == TOKENIZER.encode(TEXT)
    assert (result.tokenizer.bos_id, result.tokenizer.eos_id) == (TOKENIZER.bos_id, TOKENIZER.eos_id)
    assert result.config.vocab_size == TOKENIZER.size and result.config == result.model.config


def test_a_run_and_the_checkpoints_inside_of_it(models, tmp_path, monkeypatch):
    run = write_run(tmp_path / "runs/one", models, TOKENIZER)
    result = opened(run)
    is_model(result, models[7])
    assert result.path == run / "train/checkpoints/step-00000007" and not result.model.training
    assert {(each.dtype, each.requires_grad) for each in opened(run, torch.bfloat16).model.parameters()} == {
        (torch.bfloat16, False)}
    is_model(opened(run / "train/checkpoints/step-00000002"), models[2])
    (tmp_path / "link").symlink_to(run / "train/checkpoints/step-00000002")
    is_model(opened(tmp_path / "link"), models[2])
    monkeypatch.chdir(run / "train/checkpoints")
    is_model(opened(type(run)("step-00000002")), models[2])
    assert run_of(type(run)("step-00000002")).folder == run


def test_what_lacks_a_tokenizer_or_has_anothers_is_refused(models, tmp_path):
    run = write_run(tmp_path / "one", models, None)
    refused(UserError, r"stage tokenizer of .* is not done", opened, run)
    shutil.copytree(run / "train/checkpoints/step-00000002", tmp_path / "alone")
    refused(UserError, "outside of a run", opened, tmp_path / "alone")
    small = write_run(tmp_path / "two", {1: for_tokenizer(TOKENIZER, vocab_size=300)}, TOKENIZER)
    refused(UserError, "knows 300 ids, but its tokenizer has 512", opened, small)
