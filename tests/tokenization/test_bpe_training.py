"""Byte-level BPE: the same file every time, read as Llama 3's is, with errors that say what to change."""

import pytest

from drover.pipeline.config.data import TokenizerConfig
from drover.pipeline.core.errors import UserError
from drover.pipeline.tokenization.conversion import read_ranks
from drover.pipeline.tokenization.ready import open_tokenizer
from drover.pipeline.tokenization.tokenizer import SPECIAL_TOKENS
from drover.pipeline.tokenization.training import train_bpe
from tests.conftest import run_python
from tests.refusal import refused
from tests.tokenization.conftest import largest_that_fits


@pytest.fixture(scope="module")
def trained(chunks, tmp_path_factory):
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.model"
    train_bpe(iter(chunks), TokenizerConfig(kind="bpe", vocab_size=1152), path)
    return path


def test_it_is_a_file_of_ranks_with_the_256_special_ids_behind(trained):
    vocabulary = open_tokenizer("bpe", trained)
    assert vocabulary.kind == "tiktoken" and vocabulary.size == vocabulary.used == 1152
    ranks = read_ranks(trained)
    assert len(ranks) == 1152 - len(SPECIAL_TOKENS) and vocabulary.bos_id == 1152 - 256
    assert {bytes([value]) for value in range(256)} == {token for token, rank in ranks.items() if rank < 256}


def test_the_file_does_not_depend_on_threads_or_hash_seeds(trained, chunks, tmp_path):
    (tmp_path / "chunks").write_bytes(repr(chunks).encode())
    code = ("import ast, sys; from pathlib import Path; from drover.pipeline.config.data import TokenizerConfig; "
            "from drover.pipeline.tokenization.training import train_bpe; "
            "train_bpe(ast.literal_eval(Path(sys.argv[1]).read_text()), TokenizerConfig(kind='bpe', vocab_size=1152), "
            "Path(sys.argv[2]))")
    path = tmp_path / "again.model"
    run_python("-c", code, tmp_path / "chunks", path, RAYON_NUM_THREADS="3", PYTHONHASHSEED="3")
    assert path.read_bytes() == trained.read_bytes()


def test_the_error_for_a_too_large_vocabulary_counts_the_ids_that_fit(tmp_path):
    text = ["hello world, hello there\n" * 9, "".join(chr(0x4E00 + number) for number in range(400))]
    size = largest_that_fits(r"vocab_size 32768 is too large .* supports \d+ ids", lambda size:
                             train_bpe(text, TokenizerConfig(kind="bpe", vocab_size=size), tmp_path / "m"))
    assert open_tokenizer("bpe", tmp_path / "m").size == size


def test_no_text_is_refused(tmp_path):
    refused(UserError, "There is nothing to merge", train_bpe, [], TokenizerConfig(kind="bpe", vocab_size=640),
            tmp_path / "m")
