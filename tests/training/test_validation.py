"""Which held-out documents are measured on while training: a fixed choice, made with little in mind."""

import numpy as np
import pytest

from pipeline.data.shard_table import open_shards
from pipeline.data.token_shards import write_shard
from pipeline.files import output_record
from pipeline.training.validation import some_documents


@pytest.mark.parametrize("tokens", [1, 30, 200, 10**6])
def test_documents_are_taken_in_the_order_of_their_keys_over_all_shards(tmp_path, tokens):
    draw, records = np.random.default_rng(0), []
    for number in range(6):
        path, lengths = tmp_path / f"heldout/web-{number:05d}.arrow", draw.integers(0, 12, 9)
        keys = [draw.bytes(16).hex() for _ in lengths]
        content = write_shard(path, [draw.integers(0, 99, length) for length in lengths],
                              draw.integers(0, 50, len(lengths)).tolist(), keys, dtype="uint16", metadata={})
        records.append(output_record(tmp_path, path, split="heldout", source="web", **content))
    shards = open_shards(tmp_path, records, "heldout")
    documents, text_bytes = [], 0
    for _, number, index in sorted((shard.document_key(index), number, index) for number, shard in enumerate(shards)
                                   for index in range(shard.documents)):
        if sum(map(len, documents)) >= tokens:
            break
        documents.append(shards[number].document_tokens(index).tolist())
        text_bytes += shards[number].document_bytes(index)
    found = some_documents(shards, tokens)
    assert [document.tolist() for document in found.documents] == documents and found.text_bytes == text_bytes
    assert 1 <= len(documents) <= 54 and (tokens < 10**6) == (len(documents) < 54)
