"""What every engine shares: what of a micro-batch the model gets, and whether all of it learns."""

from types import SimpleNamespace

import numpy as np
import pytest

from drover.pipeline.data.sampling.batch import pack
from drover.pipeline.training.engine import Engine, without_gradient


@pytest.mark.parametrize("windowed", [False, True])
def test_documents_are_kept_apart_unless_asked_otherwise(windowed):
    """By lengths that the loader knows: nobody waits for a GPU to find where documents begin."""
    batch = pack([(np.arange(33), np.array([0, 11, 20])), (np.arange(33), np.array([5]))])
    apart, across = (Engine.inputs(SimpleNamespace(across_documents=requested, windowed=windowed, proven=True), batch)
                     for requested in (False, True))
    assert apart["documents"] is batch.documents and apart["positions"] is batch.positions
    assert apart["document_lengths"] == [11, 9, 12, 5, 27] and "positions" not in across
    assert across.get("document_lengths") == ([32, 32] if windowed else None), "to a window's backend a row is one"
    assert not across.get("documents", batch.tokens.new_zeros(1)).any()
    for given in (apart, across):
        assert given["tokens"] is batch.tokens and given["labels"] is batch.labels


SCORES = QUERY, KEY, *_ = [f"layers.0.attention.{name}.weight" for name in ("wq", "wk", "q_norm", "k_norm")]
"""What decides who attends to whom, and nothing else."""


@pytest.mark.parametrize(("counts", "attending", "message"), [
    ([5, 1, 2, 1, 1, 3], True, ""), ([5, 0, 0, 0, 0, 3], False, ""),  # every target's token sees itself only
    ([5, 0, 0, 1, 1, 3], True, f": {QUERY}, {KEY}, of 6 parameters, got no gradient"),
    ([0, 0, 0, 0, 0, 3], False, ": tok_embeddings.weight, of 6"), ([0] * 6, True, f"{KEY} and 3 more, of 6")])
def test_parameters_without_a_gradient_are_named_and_scores_that_nothing_is_seen_by_are_not(counts, attending, message):
    result = without_gradient(["tok_embeddings.weight", *SCORES, "norm.weight"], counts, attending)
    assert message in result and bool(message) == bool(result)
