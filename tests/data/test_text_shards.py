"""Text shards: equal bytes for equal documents, readable by other WebDataset readers, torn ones named."""

import hashlib
import re
import tarfile
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from webdataset.writer import TarWriter

from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import output_record
from drover.pipeline.data.documents import Document, from_json, to_json
from drover.pipeline.data.text_shards import read_documents, read_shard, read_texts, write_members
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


@settings(max_examples=60)
@given(members=st.lists(st.tuples(st.text("abc-0.", min_size=1, max_size=12) | st.sampled_from(["k" * 94, "k" * 95]),
                                  st.binary(max_size=20) | st.sampled_from(
                                      [b"x" * size for size in (511, 512, 513, 9728, 10240)])), max_size=8))
def test_bytes_are_those_of_webdatasets_writer(tmp_path, members):
    write_members(tmp_path / "ours.tar", members)
    with open(tmp_path / "theirs.tar", "wb") as file, TarWriter(
            file, encoder=False, compress=False, user="", group="", mode=0o644, mtime=0) as tar:
        for name, member in members:
            tar.write({"__key__": name, "json": member})
    assert (tmp_path / "ours.tar").read_bytes() == (tmp_path / "theirs.tar").read_bytes()


def found(path, only=None):
    """Documents of a shard, and what is told of it."""
    documents = []
    try:
        documents.extend(read_documents(path, only))
    except UserError as error:
        return documents, str(error)
    return documents, None


@given(only=st.sampled_from([None, {0}, {1, 3}, set()]), place=st.integers(0, 20_000), byte=st.integers(0, 255),
       cut=st.booleans())
def test_any_byte_may_be_wrong(shard, tmp_path, record, only, place, byte, cut):
    """In a header, a text or the end: the reader gives documents of the shard, or the same ones with other letters.
    Webdataset's reader gives no text of a changed shard without an error: where it is cut between two members, only the
    hash shows it."""
    sound, path = shard.read_bytes(), tmp_path / "harmed" / record["path"]
    place %= len(sound)
    data = sound[:place] if cut else sound[:place] + bytes([byte]) + sound[place + 1:]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    whole, [documents, told] = found(shard, only)[0], found(path, only)
    assert told or len(documents) == len(whole)
    assert sum(one != other for one, other in zip(documents, whole, strict=False)) <= 1
    texts = (text for batch in read_texts(tmp_path / "harmed", record, 3000) for text in batch.texts)
    if data == sound:
        assert list(texts) == [own.text for own in DOCUMENTS]
    else:
        refused(UserError, r"web-00000\.tar is not what the stage shard committed", list, texts)


@pytest.mark.parametrize("inside", [False, True])
def test_a_cut_is_noticed_and_named(shard, inside):
    """Also between two members, where other readers notice nothing. Documents before it are given first."""
    with tarfile.open(shard) as tar:
        member = list(tar)[2]
    shard.write_bytes(shard.read_bytes()[:member.offset_data + 100 if inside else member.offset])
    seen, told = found(shard)
    assert re.search(r"web-00000\.tar is truncated.*shard again", told) and (member.name in told) == inside
    assert [document.text for document in seen] == [own.text for own in DOCUMENTS[:2]]
    shard.unlink()
    assert "web-00000.tar is missing" in found(shard)[1]


def test_a_changed_letter_and_another_number_of_documents_are_noticed(shard, tmp_path, record):
    assert list(read_shard(tmp_path, record)) == [replace(own, key=key(own.text)) for own in DOCUMENTS]
    refused(UserError, "holds 4 documents instead of 3", list, read_texts(tmp_path, {**record, "docs": 3}, 10))
    shard.write_bytes(shard.read_bytes().replace(b"n. text.", b"n. text!"))
    refused(UserError, r"page\.3 does not have the hash", list, read_shard(tmp_path, record))
    write_documents(shard, DOCUMENTS[:3])
    refused(UserError, "holds 3 documents instead of 4", list, read_shard(tmp_path, record))


@pytest.mark.parametrize("member", [b"{not json", b'{"source": "web", "id": "1", "meta": {}}', b"[]",
                                    b'{"text": 5, "source": "web", "id": "1", "meta": {}}', b'{"text": "\xff"}'])
def test_a_member_that_is_no_document_is_named(tmp_path, member):
    whole = to_json(Document("a", "s", "1", {}))
    write_members(tmp_path / "s.tar", [("abc", whole), ("broken", member)])
    refused(UserError, r"s\.tar.*broken\.json", list, read_documents(tmp_path / "s.tar"))


@given(text=st.text(),
       value=st.integers(-2**63, 2**64 - 1) | st.text() | st.floats(allow_nan=False, allow_infinity=False))
def test_a_member_reads_back_as_it_was(text, value):
    document = Document(text, "s", "1", {"m": [value, None, {"n": True}]})
    assert from_json(to_json(document), "") == document


def test_half_a_character_is_not_written():
    refused(UnicodeEncodeError, "surrogates", to_json, Document("t", "s", "1", {"a": "\ud800"}))


def test_the_pages_snippet_reads_them_through_a_data_loader(tmp_path):
    """What a user of webdataset writes; every document once, as it is."""
    page = (REPOSITORY / "docs/tokens.md").read_text()
    snippet, = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "webdataset" in block)
    for number, documents in enumerate((DOCUMENTS[:3], DOCUMENTS[3:])):
        write_documents(tmp_path / f"runs/demo/shard/train/web-0000{number}.tar", documents)
    assert run_python("-c", snippet, cwd=tmp_path).stdout.splitlines() == [
        f"web {own.id} {len(own.text)}" for own in DOCUMENTS]


def test_what_was_committed_and_is_no_text_shard_is_refused(tmp_path):
    write_members(tmp_path / "a.tar", [("a", b"[]")])
    refused(UserError, "is no text shard", list,
            read_texts(tmp_path, output_record(tmp_path, tmp_path / "a.tar", docs=1), 10))
