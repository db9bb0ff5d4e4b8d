"""PDF files: the text of their pages, and what holds none."""

from pathlib import Path

import pytest

from tests.data.reading.test_warc import archive
from tests.data.source_files import read, texts

FERRY, DRAWINGS = (Path(__file__).parent.joinpath(f"{name}.pdf").read_bytes() for name in ("ferry", "drawings"))
"""Three pages, of which the second has no text; and two that have none."""
JOINED = "The ferry took everyone over the river, größer\nthan a cooperation\nBy boat"


def test_pages_and_divided_words_are_joined(tmp_path):
    (tmp_path / "a.pdf").write_bytes(FERRY)
    [document], rejections = read(tmp_path / "a.pdf")
    assert (document.text, document.id, rejections) == (JOINED, "a.pdf", [])
    assert document.meta == {"title": "Boats", "language": "en", "pages_without_text": 1}


def test_files_in_warc_files_are_read_too(tmp_path):
    (tmp_path / "a.warc.gz").write_bytes(archive(("a", FERRY, "application/pdf", {})))
    assert texts(read(tmp_path / "a.warc.gz")[0]) == [JOINED]


@pytest.mark.parametrize(("data", "reason"), [
    (DRAWINGS, "none of its 2 pages holds text, as where they are scanned"),
    (FERRY[:300], "no text can be taken out"), (b"<html>", "no text can be"), (b"PK\3\4", "it is a zip file")])
def test_what_holds_no_text_is_rejected_with_the_reason(tmp_path, data, reason):
    (tmp_path / "a.pdf").write_bytes(data)
    documents, [rejection] = read(tmp_path / "a.pdf")
    assert documents == [] and rejection.reason.startswith(reason) and "memory" not in rejection.reason
