"""What every engine shares: how a micro-batch becomes a loss."""

import numpy as np
import torch

from drover.model.config import ModelConfig
from drover.model.llama import Llama, initialise
from drover.pipeline.data.sampling.batch import pack
from drover.pipeline.training.engines.engine import Engine, without_gradient

CONFIG = ModelConfig(dim=32, layers=2, heads=2, kv_heads=1, vocab_size=64, context_length=32)


class Losses(Engine):
    """An engine as far as a micro-batch's loss."""

    def __init__(self, across_documents, windowed=False):
        self.across_documents, self.windowed, self.proven = across_documents, windowed, True


Losses.__abstractmethods__ = frozenset()


def test_documents_are_kept_apart_unless_asked_otherwise():
    model = Llama(CONFIG)
    initialise(model, CONFIG, seed=0)
    random = np.random.default_rng(0)
    batch = pack([(random.integers(0, 64, 33), np.array([0, 11, 20])) for _ in range(2)])

    def loss(across):
        return Losses(across).loss(model, batch)

    assert torch.equal(loss(True), model(batch.tokens, batch.labels))
    assert torch.equal(loss(False), model(batch.tokens, batch.labels, documents=batch.documents,
                                          positions=batch.positions))
    assert not torch.equal(loss(True), loss(False))
    assert int((batch.labels == -100).sum()) == 4, "no document's end predicts the next one's start, either way"


def test_attention_gets_the_lengths_that_the_loader_knows():
    """Nobody waits for a GPU to say where documents begin."""
    given = {}

    def model(tokens, labels, **others):
        given.update(others)
        return torch.zeros(())

    batch = pack([(np.arange(33), np.array([0, 11, 20])), (np.arange(33), np.array([5]))])

    def lengths(across, windowed):
        given.clear()
        Losses(across, windowed).loss(model, batch)
        return given.get("document_lengths")

    assert lengths(False, False) == lengths(False, True) == [11, 9, 12, 5, 27]
    assert lengths(True, False) is None
    assert lengths(True, True) == [32, 32], "a window is seen through by the backend, to which a row is a document"


def test_parameters_without_a_gradient_are_named_and_scores_that_nothing_is_seen_by_are_not():
    names = ["tok_embeddings.weight", "layers.0.attention.wq.weight", "layers.0.attention.wk.weight", "norm.weight"]
    assert without_gradient(names, [5, 1, 2, 3], attending=True) == ""
    assert without_gradient(names, [5, 0, 0, 3], attending=False) == "", "every target's token sees itself only"
    assert "layers.0.attention.wq.weight, layers.0.attention.wk.weight, of 4 parameters, got no gradient" in \
        without_gradient(names, [5, 0, 0, 3], attending=True)
    assert ": tok_embeddings.weight, of 4" in without_gradient(names, [0, 0, 0, 3], attending=False)
    assert "wk.weight and 1 more, of 4" in without_gradient(names, [0, 0, 0, 0], attending=True)
