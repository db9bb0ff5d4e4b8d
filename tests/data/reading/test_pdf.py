"""PDF files: the text of their pages, and what holds none."""

import io

import pytest

from tests.data.reading.test_warc import archive
from tests.data.source_files import read, texts


def pdf(*pages, title=""):
    """A PDF file of pages, each the lines of its text, or None for a drawing."""
    objects = [b"<< /Type /Catalog /Pages 2 0 R >>", b"",
               b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>"]
    kids = []
    for lines in pages:
        shown = b" ".join(b"(%s) Tj T*" % line.encode("cp1252") for line in lines or ())
        content = b"0 0 9 9 re f" if lines is None else b"BT /F1 12 Tf 14 TL 72 720 Td %s ET" % shown
        objects.append(b"<< /Length %d >>\nstream\n%s\nendstream" % (len(content), content))
        objects.append(b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Resources << /Font << /F1 3 0 R >> >> "
                       b"/Contents %d 0 R >>" % len(objects))
        kids.append(b"%d 0 R" % len(objects))
    objects[1] = b"<< /Type /Pages /Kids [%s] /Count %d >>" % (b" ".join(kids), len(kids))
    objects.append(b"<< /Title (%s) >>" % title.encode())
    file = io.BytesIO(b"%PDF-1.4\n")
    file.seek(0, io.SEEK_END)
    places = []
    for number, own in enumerate(objects, 1):
        places.append(b"%010d 00000 n \n" % file.tell())
        file.write(b"%d 0 obj\n%s\nendobj\n" % (number, own))
    table = file.tell()
    file.write(b"xref\n0 %d\n0000000000 65535 f \n%s" % (len(objects) + 1, b"".join(places)))
    file.write(b"trailer << /Size %d /Root 1 0 R /Info %d 0 R >>\nstartxref\n%d\n%%%%EOF\n" % (
        len(objects) + 1, len(objects), table))
    return file.getvalue()


FERRY = ["The ferry took every-", "one over the river, gr\xf6\xdfer", "than a co-"]
JOINED = "The ferry took everyone over the river, größer\nthan a cooperation\nBy boat"


def test_pages_and_divided_words_are_joined(tmp_path):
    (tmp_path / "a.pdf").write_bytes(pdf(FERRY, None, ["operation", "By boat"], title="Boats"))
    [document], rejections = read(tmp_path / "a.pdf")
    assert (document.text, document.id, rejections) == (JOINED, "a.pdf", [])
    assert document.meta == {"title": "Boats", "language": "en", "pages_without_text": 1}


def test_files_in_warc_files_are_read_too(tmp_path):
    (tmp_path / "a.warc.gz").write_bytes(archive(("a", pdf(FERRY[:2]), "application/pdf", {})))
    assert texts(read(tmp_path / "a.warc.gz")[0]) == [JOINED.partition("\n")[0]]


@pytest.mark.parametrize(("data", "reason"), [
    (pdf(None, None), "none of its 2 pages holds text, as where they are scanned"),
    (pdf(FERRY)[:300], "no text can be taken out"), (b"<html>", "no text can be"), (b"PK\3\4", "it is a zip file")])
def test_what_holds_no_text_is_rejected_with_the_reason(tmp_path, data, reason):
    (tmp_path / "a.pdf").write_bytes(data)
    documents, [rejection] = read(tmp_path / "a.pdf")
    assert documents == [] and rejection.reason.startswith(reason)
