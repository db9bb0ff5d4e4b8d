"""Which validation documents are measured."""

import numpy as np
import pytest

from drover.pipeline.data.token_shards import ChosenDocuments, TokenShard, choose
from tests.token_shards import write_documents


@pytest.fixture
def shards(tmp_path):
    """Two shards of one source; a token's value says its document."""
    draw = np.random.default_rng(0)
    result, number = [], 0
    for name in ("a", "b"):
        lengths = draw.integers(2, 30, 20)
        tokens = [np.full(length, number + at, np.uint16) for at, length in enumerate(lengths)]
        keys = [draw.bytes(16).hex() for _ in lengths]
        record = write_documents(tmp_path / name, tokens, [int(length) * 3 for length in lengths], keys, dtype="uint16",
                             metadata={})
        result.append(TokenShard(tmp_path / name, {**record, "source": "s", "bytes": (tmp_path / name).stat().st_size}))
        number += len(lengths)
    return result


@pytest.mark.parametrize("limit", [1, 200])
def test_documents_are_taken_in_the_order_of_their_keys_over_all_shards(shards, limit):
    chosen, order = choose(shards, limit), sorted(
        (each.document_key(place), number, place) for number, each in enumerate(shards) for place in range(20))
    totals = np.cumsum([len(shards[number].document_tokens(place)) for _, number, place in order])
    first = [(number, place) for _, number, place in order[:int(np.searchsorted(totals, limit)) + 1]]
    assert list(zip(chosen.shards.tolist(), chosen.places.tolist(), strict=True)) == sorted(first), "as they lie"
    read = list(ChosenDocuments(shards, chosen))
    assert [len(document) for document in read] == chosen.lengths.tolist()
    assert chosen.text_bytes.tolist() == [3 * len(document) for document in read]
    assert (chosen.of_documents, chosen.of_tokens) == (40, totals[-1])
    assert [len(choose(shards, more)) for more in (None, 10**9)] == [40, 40] and len(choose([], limit)) == 0
