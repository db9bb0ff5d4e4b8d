"""What every engine shares: how a micro-batch becomes a loss."""

from types import SimpleNamespace

import numpy as np
import torch

from model.config import ModelConfig
from model.llama import Llama, initialise
from pipeline.data.loader import pack
from pipeline.training.engine import Engine

CONFIG = ModelConfig(dim=32, layers=2, heads=2, kv_heads=1, vocab_size=64, context_length=32)


def test_documents_are_kept_apart_unless_asked_otherwise():
    model = Llama(CONFIG)
    initialise(model, CONFIG, seed=0)
    random = np.random.default_rng(0)
    batch = pack([(random.integers(0, 64, 33), np.array([0, 11, 20])) for _ in range(2)])

    def loss(across):
        return Engine.loss(SimpleNamespace(across_documents=across, loss_factor=1.0), model, batch)

    assert torch.equal(loss(True), model(batch.tokens, batch.labels))
    assert torch.equal(loss(False), model(batch.tokens, batch.labels, documents=batch.documents,
                                          positions=batch.positions))
    assert not torch.equal(loss(True), loss(False))
    assert int((batch.labels == -100).sum()) == 4, "no document's end predicts the next one's start, either way"
