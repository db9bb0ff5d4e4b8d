"""Text shards: equal bytes for equal documents, readable by other WebDataset readers, torn ones named."""

import hashlib
import re
import tarfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import output_record
from drover.pipeline.data.documents import Document, to_json
from drover.pipeline.data.text_shards import read_shard, read_texts, write_members
from tests.conftest import REPOSITORY, run_python
from tests.refusal import refused

DOCUMENTS = [Document(text, "web", f"page.{number}", {"stars": number, "tags": ["a.b", None]})
             for number, text in enumerate(["short", "ü € 漢字 \u2028 \0", "x" * 5000, "dots. in. text."])]


def key(text):
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def write_documents(path, documents):
    """Write documents as a shard, under keys made from their texts."""
    write_members(path, ((key(document.text), to_json(document)) for document in documents))


@pytest.fixture
def shard(tmp_path):
    path = tmp_path / "train" / "web-00000.tar"
    write_documents(path, DOCUMENTS)
    return path


@pytest.fixture
def record(shard, tmp_path):
    return output_record(tmp_path, shard, split="train", source="web", docs=len(DOCUMENTS))


def read(folder, record, only=None):
    """Documents of a shard, and the error that ends them."""
    documents = []
    try:
        documents.extend(read_shard(folder, record, only))
    except UserError as error:
        return documents, str(error)
    return documents, None


@given(only=st.sampled_from([None, {0}, {1, 3}, set()]), place=st.integers(0, 20_000), byte=st.integers(0, 255),
       cut=st.booleans())
def test_any_byte_may_be_wrong(shard, tmp_path, record, only, place, byte, cut):
    """In a header, a text or the end: a reader gives documents of the shard, or an error. What is not text may differ
    in one document, where only the hash of the whole file shows it."""
    valid, path = shard.read_bytes(), tmp_path / "harmed" / record["path"]
    place %= len(valid)
    data = valid[:place] if cut else valid[:place] + bytes([byte]) + valid[place + 1:]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    [complete, _], [documents, error] = read(tmp_path, record, only), read(tmp_path / "harmed", record, only)
    assert error or len(documents) == len(complete)
    assert [one.text for one in documents] == [one.text for one in complete[:len(documents)]]
    assert sum(one != other for one, other in zip(documents, complete, strict=False)) <= 1
    texts = (text for batch in read_texts(tmp_path / "harmed", record, 3000) for text in batch.texts)
    if data == valid:
        assert list(texts) == [own.text for own in DOCUMENTS]
    else:
        refused(UserError, r"web-00000\.tar is not what the stage shard committed", list, texts)


@pytest.mark.parametrize("inside", [False, True])
def test_a_cut_is_noticed_and_named(shard, tmp_path, record, inside):
    """Also between two members, where webdataset notices nothing. Documents before it are given first."""
    with tarfile.open(shard) as tar:
        _, before, member, _ = tar
    shard.write_bytes(shard.read_bytes()[:member.offset_data + 100 if inside else member.offset])
    documents, error = read(tmp_path, record)
    message = f"no text shard, after the member {before.name}" if inside else "holds 2 documents instead of 4"
    assert message in error and "shard again" in error
    assert [document.text for document in documents] == [own.text for own in DOCUMENTS[:2]]
    shard.unlink()
    assert "web-00000.tar cannot be read: No such file or directory. Run" in read(tmp_path, record)[1]


@pytest.mark.slow
def test_the_pages_snippet_reads_them_through_a_data_loader(tmp_path):
    """What a user of webdataset writes; every document once, as it is."""
    page = (REPOSITORY / "docs/tokens.md").read_text()
    snippet, = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "webdataset" in block)
    for number, documents in enumerate((DOCUMENTS[:3], DOCUMENTS[3:])):
        write_documents(tmp_path / f"runs/demo/shard/train/web-0000{number}.tar", documents)
    assert run_python("-c", snippet, cwd=tmp_path).stdout.splitlines() == [
        f"web {own.id} {len(own.text)}" for own in DOCUMENTS]


def test_equal_documents_give_equal_bytes(shard, tmp_path):
    """Whoever writes them, and when. `tar` reads them."""
    write_documents(tmp_path / "again.tar", DOCUMENTS)
    assert shard.read_bytes() == (tmp_path / "again.tar").read_bytes()
    with tarfile.open(shard) as tar:
        assert {(member.mtime, member.uid, member.uname, member.mode) for member in tar} == {(0, 0, "", 0o644)}
        assert tar.getnames() == [f"{key(document.text)}.json" for document in DOCUMENTS]
