"""What `train.attention` means to a run."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from model.attention.by_document import ByDocument
from model.config import ModelConfig
from pipeline.errors import UserError
from pipeline.parallel.attention import choose_attention
from tests.conftest import run_stage
from tests.stages.training import train_folder

CPU = torch.device("cpu")


def test_what_cannot_be_had_is_said_to_the_user():
    assert isinstance(choose_attention("auto", ModelConfig(), CPU, torch.float32, False).backend, ByDocument)
    with pytest.raises(UserError, match=r"train.attention cannot be had here: attention 'varlen' needs a GPU, not"):
        choose_attention("varlen", ModelConfig(), CPU, torch.bfloat16, False)
    with pytest.raises(UserError, match="'by_document' cannot be compiled"):
        choose_attention("by_document", ModelConfig(), CPU, torch.float32, True)


def test_a_run_says_what_computed_its_attention(fresh):
    few = ("train.steps=2", "train.warmup_steps=1")
    refused = run_stage("train", fresh, *few, "train.attention=flex", expect=2)
    assert "attention 'flex' has no backward pass on a cpu device" in refused.stderr
    assert "Traceback" not in refused.stderr
    run_stage("train", fresh, *few)
    events = [json.loads(line) for line in (train_folder(fresh) / "events.jsonl").read_text().splitlines()]
    assert [event["attention"] for event in events if event["event"] == "start"] == ["by_document"]


@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler, which inductor needs on a CPU")
def test_a_fallback_is_said_once(fresh):
    result = run_stage("train", fresh, "train.steps=2", "train.warmup_steps=1", "train.sample_every=9",
                       "train.compile=true")
    assert (result.stdout + result.stderr).count("so sdpa computes attention inside documents") == 1
