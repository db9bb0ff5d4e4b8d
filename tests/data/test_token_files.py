"""Files of tokens of other programs: each document comes once, whatever the parts; what is cut or strange is named."""

import struct
from itertools import pairwise

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from drover.pipeline.core.errors import UserError
from drover.pipeline.data import token_files
from drover.pipeline.data.token_files import read_tokens, split_documents
from tests.refusal import refused, table

EOS = 7
BOS = 6
DRAW = np.random.default_rng(3)
DOCUMENTS = [DRAW.integers(8, 40_000, size).tolist() for size in (*DRAW.integers(1, 90, 60).tolist(), 700, 1, 2)]
STREAM = [token for document in DOCUMENTS for token in (*document, EOS)]


def raw(folder, kind="<u2", name="a.bin", ids=STREAM):
    path = folder / name
    np.array(ids, kind).tofile(path)
    return path


def numpys(folder):
    np.save(path := folder / "a.npy", np.array(STREAM, "<i8"))
    return path


def llm_c(folder, number=20240520, version=1, kind="<u2", ids=(EOS, *STREAM)):
    """EOS before each document, and after the last."""
    path = folder / "a.bin"
    header = np.zeros(256, "<i4")
    header[:3] = number, version, len(ids)
    path.write_bytes(header.tobytes() + np.array(ids, kind).tobytes())
    return path


def megatron(folder, documents=tuple([*document, EOS] for document in DOCUMENTS), per_document=1, code=8, kind="<u2"):
    """Megatron's layout, by its publication; each document in so many sequences."""
    path = folder / "a.bin"
    sequences = [part for document in documents for part in np.array_split(document, per_document)]
    lengths = np.array([*map(len, sequences)], "<i4")
    pointers = (np.cumsum(lengths) - lengths) * np.dtype(kind).itemsize
    np.concatenate(sequences).astype(kind).tofile(path)
    bounds = np.arange(len(documents) + 1) * per_document
    path.with_suffix(".idx").write_bytes(
        struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, len(lengths), len(bounds)) + lengths.tobytes()
        + pointers.astype("<i8").tobytes() + bounds.astype("<i8").tobytes())
    return path


def datatrove(folder, size=2, **settings):
    from datatrove.pipeline.tokens.tokenizer import TokenizedFile
    file = TokenizedFile(str(folder), "a.ds", tokenizer_name_or_path="some/one", save_final_metadata=True,
                         token_size=size, **settings)
    for document in DOCUMENTS:
        file.write([*document, EOS], None)
    file.close()
    return folder / "a.ds"


def parquet(folder):
    rows = pa.table({"text": ["x"] * len(DOCUMENTS), "input_ids": pa.array(DOCUMENTS, pa.list_(pa.int32()))})
    pq.write_table(rows, path := folder / "a.parquet", row_group_size=5)
    return path


def saved(folder):
    datasets.Dataset.from_dict({"input_ids": DOCUMENTS}).save_to_disk(folder / "saved", num_shards=1)
    return next((folder / "saved").glob("*.arrow"))


def arrow_file(folder):
    rows = pa.table({"input_ids": pa.array(DOCUMENTS, pa.large_list(pa.uint16()))})
    with pa.ipc.new_file(path := folder / "a.arrow", rows.schema) as writer:
        writer.write_table(rows, max_chunksize=7)
    return path


FORMS = [raw, lambda folder: raw(folder, name="a.npy"), numpys, llm_c,
         lambda folder: llm_c(folder, 20240801, 7, "<u4"), megatron,
         lambda folder: megatron(folder, DOCUMENTS, 3, 4, "<i4"), datatrove,
         lambda folder: datatrove(folder, 4), lambda folder: datatrove(folder, save_index=False), parquet, saved,
         arrow_file]


def documents_of(path, cuts):
    """The documents of all parts of a file, which is cut there."""
    result = []
    borders = sorted({0, *cuts, path.stat().st_size})
    for low, high in pairwise(borders):
        for block in read_tokens(path, low, high, "uint16", "input_ids", [BOS, EOS]):
            ids, lengths = split_documents(block, [BOS, EOS])
            result += [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1]) if len(part)]
    return result


@pytest.mark.parametrize("make", FORMS)
def test_documents_come_once_and_in_order_whatever_the_parts(make, tmp_path, monkeypatch):
    path = make(tmp_path)
    assert documents_of(path, []) == DOCUMENTS
    for block in (1, 50, 1 << 22):
        monkeypatch.setattr(token_files, "BLOCK_IDS", block)
        size = path.stat().st_size
        assert documents_of(path, DRAW.integers(0, size, 9).tolist()) == DOCUMENTS
        assert documents_of(path, range(0, size, size // 40)) == DOCUMENTS


def test_bos_and_eos_separate_documents_inside_those_of_a_format_too(tmp_path):
    """So that none is inside of a document, where training would meet it. What is empty is no document."""
    packed = [[BOS, 10, 11, EOS, BOS, 12, EOS, EOS], [13, BOS], [EOS], [14, 9, 15]]
    path = megatron(tmp_path, packed)
    assert documents_of(path, []) == [[10, 11], [12], [13], [14, 9, 15]]
    ids, lengths = split_documents(next(read_tokens(path, 0, 99, "uint16", "", [EOS, BOS, 9])), [EOS, BOS, 9])
    assert (ids.tolist(), lengths.tolist()) == ([10, 11, 12, 13, 14, 15], [2, 1, 1, 1, 1])


def test_a_file_without_separators_is_not_taken_for_one_document(tmp_path, monkeypatch):
    monkeypatch.setattr(token_files, "BLOCK_IDS", 10)
    monkeypatch.setattr(token_files, "MOST_IDS", 400)
    blocks = read_tokens(raw(tmp_path), 0, 9999, "uint16", "", [BOS, EOS])
    refused(UserError, r"a document of more than \d+ ids from token .*, if \[6, 7\] separate documents", list, blocks)


def shortened(path):
    path.write_bytes(path.read_bytes()[:-1])
    return path


def table_of(folder, **columns):
    pq.write_table(pa.table(columns), path := folder / "a.parquet")
    return path


def with_index(path, change, at):
    index = path.with_suffix(".idx")
    data = bytearray(index.read_bytes())
    data[at:at + len(change)] = change
    index.write_bytes(data)
    return path


DAMAGES = {
    "raw": lambda folder: shortened(raw(folder)), "llm_c": lambda folder: shortened(llm_c(folder)),
    "wide": lambda folder: raw(folder, "<u4"),
    "numpys": lambda folder: shortened(numpys(folder)), "megatron": lambda folder: shortened(megatron(folder)),
    "datatrove": lambda folder: raw(folder, name=datatrove(folder).name, ids=STREAM[:-1]),
    "parquet": lambda folder: shortened(parquet(folder)), "arrow": lambda folder: shortened(arrow_file(folder)),
    "evaluation": lambda folder: llm_c(folder, 20240522),
    "floats": lambda folder: with_index(megatron(folder), b"\6", 17),
    "index": lambda folder: shortened(megatron(folder).with_suffix(".idx")).with_suffix(".bin"),
    "matrix": lambda folder: [np.save(folder / "a.npy", np.zeros((2, 3), int)), folder / "a.npy"][1],
    "short": lambda folder: shortened(shortened(megatron(folder))),
    "text": lambda folder: table_of(folder, input_ids=["a"]), "missing": lambda folder: table_of(folder, ids=[[1]])}


@pytest.mark.parametrize(("damage", "message"), table("""
    raw -> multiple of the data-type size
    wide -> its ids have four bytes
    llm_c -> its header of llm.c has the number 20240520, the version 1 and 3,313 ids
    numpys -> mmap length is greater than file ?size
    megatron -> multiple of the data-type size
    short -> a.idx ends elsewhere
    datatrove -> a.ds.index ends elsewhere
    parquet -> Parquet
    arrow -> Arrow
    evaluation -> number 20240522
    floats -> a.idx is cut, or no index of Megatron's
    index -> a.idx is cut, or no index of Megatron's
    matrix -> is an array \\(2, 3\\) of int64, not a row of ids
    text -> has no column input_ids with lists of ids
    missing -> has no column input_ids with lists of ids"""))
def test_cut_and_strange_files_are_refused_by_name(damage, message, tmp_path):
    tokens = read_tokens(DAMAGES[damage](tmp_path), 0, 9999, "uint16", "input_ids", [BOS, EOS])
    refused(UserError, rf"a\.\w+ is cut or not what its name says: .*({message})", list, tokens)


def test_rows_without_ids_are_refused(tmp_path):
    for rows in ([[1], None], [[1, None]]):
        path = table_of(tmp_path, input_ids=pa.array(rows, pa.list_(pa.int32())))
        refused(UserError, "has a null", list, read_tokens(path, 0, 9999, "uint16", "input_ids", [EOS]))
