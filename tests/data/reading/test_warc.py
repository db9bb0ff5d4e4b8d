"""WARC and WET files: which records are pages, how they are decoded, and what is damaged."""

import gzip
import io
import re
import zlib

import brotli
import pytest
import zstandard
from warcio.statusandheaders import StatusAndHeaders
from warcio.warcwriter import WARCWriter

from drover.pipeline.data.counts import files_read, passed_over, remarks
from drover.pipeline.data.reading import unit_documents
from tests.data.source_files import files_source, lost, payload_of, read, separated, texts

CHUNKED = b"7\r\n<p>Caf\xc3\r\n5\r\n\xa9</p>\r\n0\r\n\r\n"
PAGE = "<html><head><title>Café</title></head><body><p>Café</p></body></html>"
UTF8 = PAGE.encode()
RESPONSES = [
    ("plain", UTF8, "text/html", {}), ("gzip", gzip.compress(UTF8), "text/html", {"Content-Encoding": "gzip"}),
    ("br", brotli.compress(UTF8), "text/html", {"Content-Encoding": "br"}),
    ("zstd", zstandard.compress(UTF8), "text/html", {"Content-Encoding": "zstd"}),
    ("deflate", zlib.compress(UTF8), "text/html", {"Content-Encoding": "deflate"}),
    ("raw", zlib.compress(UTF8)[2:-4], "text/html", {"content-encoding": "deflate"}),
    ("twice", gzip.compress(brotli.compress(UTF8)), "text/html", {"Content-Encoding": "br, gzip"}),
    ("none", UTF8, "text/html", {"Content-Encoding": "UTF-8"}),
    ("chunked", CHUNKED, "text/html", {"Transfer-Encoding": "chunked"}),
    ("packed", b"%x;a=b\r\n%b\r\n0\r\n\r\n" % (len(gzip.compress(UTF8)), gzip.compress(UTF8)), "text/html",
     {"Transfer-Encoding": "chunked", "Content-Encoding": "gzip"}),
    ("charset", PAGE.encode("cp1252"), "text/html; charset=windows-1252", {}),
    ("xhtml", UTF8, "application/xhtml+xml;charset=utf-8", {}), ("words", "Café".encode("cp1252"), "text/plain", {})]
OTHERS = [("missing", UTF8, "text/html", {}, "404 Not Found"), ("image", b"\x89PNG\r\n", "image/png", {}, "200 OK")]


def archive(*responses, gzipped=True, **headers):
    """A WARC file of responses, with the records that a crawler writes next to them."""
    file = io.BytesIO()
    writer = WARCWriter(file, gzip=gzipped)
    writer.write_record(writer.create_warcinfo_record("a.warc", {"software": "test"}))
    for name, body, content, more, *status in responses:
        url = f"http://example.org/{name}"
        about = StatusAndHeaders(*status or ["200 OK"], [("Content-Type", content), *more.items()], protocol="HTTP/1.1")
        asked = StatusAndHeaders("GET / HTTP/1.1", [], is_http_request=True)
        writer.write_record(writer.create_warc_record(url, "request", http_headers=asked))
        writer.write_record(writer.create_warc_record(url, "response", io.BytesIO(body), http_headers=about,
                                                      warc_headers_dict=headers))
    return file.getvalue()


def wet(*pages):
    file = io.BytesIO()
    writer = WARCWriter(file, gzip=True)
    for number, text in enumerate(pages):
        writer.write_record(writer.create_warc_record(f"http://example.org/{number}", "conversion",
                                                      io.BytesIO(text.encode()), warc_content_type="text/plain"))
    return file.getvalue()


@pytest.mark.parametrize("gzipped", [False, True])
def test_responses_with_pages_are_read_and_the_rest_is_counted(tmp_path, gzipped):
    path = tmp_path / f"a.warc{'.gz' * gzipped}"
    path.write_bytes(archive(*RESPONSES, *OTHERS, gzipped=gzipped))
    inputs = list[dict]()
    documents, rejections = separated(unit_documents(payload_of(path), inputs.append))
    assert [(own.url, own.reason, own.documents) for own in rejections] == [
        ("http://example.org/missing", "with HTTP status 404", 0),
        ("http://example.org/image", "with content of type image/png", 0)]
    assert texts(documents) == ["Café"] * len(RESPONSES)
    assert [own.id for own in documents] == [f"{path.name}:{3 + 2 * number}" for number in range(len(RESPONSES))]
    first = documents[0].meta
    assert (first["url"], first["title"], first["date"][:2]) == ("http://example.org/plain", "Café", "20")
    files = files_read(inputs)
    pages = len(RESPONSES)
    assert passed_over(files) == {"of type request": pages + 2, "of type warcinfo": 1, "with HTTP status 404": 1,
                                  "with content of type image/png": 1}
    assert f"of {2 * pages + 5} records of WARC files {pages} are pages; passed over are {pages + 2} of type" in next(
        remarks(files_source(path), files))


def test_texts_of_wet_files_are_taken_as_they_are(tmp_path):
    pages = ["1 < 2\n\n  indented <b>", "橋は閉鎖された。"]
    (tmp_path / "a.warc.wet.gz").write_bytes(wet(*pages))
    documents, rejections = read(tmp_path / "*")
    assert texts(documents) == pages and rejections == [] and documents[1].meta["url"] == "http://example.org/1"
    documents, _ = read(files_source(tmp_path / "*", id_field="url"))
    assert (documents[1].id, documents[1].place) == ("http://example.org/1", "a.warc.wet.gz:2")


def record(kind, content, block, end="\r\n", length="Content-Length"):
    """A record whose header is written as some programs do."""
    lines = ["WARC/1.0", f"WARC-Type: {kind}", "WARC-Target-URI: http://a/", f"Content-Type: {content}",
             f"{length}: {len(block)}"]
    return end.join([*lines, "", ""]).encode() + block + (2 * end).encode()


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("length", ["Content-Length", "content-length", "CONTENT-LENGTH"])
def test_headers_may_be_spelled_and_end_in_other_ways(tmp_path, end, length):
    response = end.join(["HTTP/1.1 200", "content-type: text/html", "", PAGE]).encode()
    http = "application/http; msgtype=response"
    (tmp_path / "a.warc").write_bytes(record("response", http, response, end, length) * 2)
    documents, rejections = read(tmp_path / "a.warc")
    assert texts(documents) == ["Café"] * 2 and rejections == []
    assert documents[1].meta["url"] == "http://a/"


@pytest.mark.parametrize("kind", ["resource", "conversion"])
def test_the_charset_of_records_that_are_no_responses(tmp_path, kind):
    (tmp_path / "a.warc").write_bytes(record(kind, "text/plain; charset=windows-1251", "мост закрыт".encode("cp1251")) +
                                      record(kind, 'text/html;Charset="utf-8"', UTF8))
    documents, _ = read(tmp_path / "a.warc")
    assert texts(documents) == ["мост закрыт", "Café"]


def test_a_page_that_breaks_off_between_chunks_is_kept_and_counted(tmp_path):
    bodies = [CHUNKED[:end] for end in (11, 15, 18, -5)]
    (tmp_path / "a.warc.gz").write_bytes(archive(*(("a", body, "text/plain", {"Transfer-Encoding": "chunked"})
                                                   for body in bodies)))
    documents, rejections = read(tmp_path / "a.warc.gz")
    assert [own.meta.get("truncated") for own in documents] == ["chunked"] * 4 and rejections == []
    assert documents[-1].text == "<p>Café</p>"


def test_a_gzipped_page_that_breaks_off_is_kept_and_counted(tmp_path):
    packed = gzip.compress((PAGE + "<p>more words</p>" * 999).encode())
    bodies = [("cut", packed[:len(packed) // 2]), ("whole", packed), ("old", packed)]
    (tmp_path / "a.warc").write_bytes(archive(*(
        (name, body, "text/html", {"Content-Encoding": "x-gzip" if name == "old" else "gzip"})
        for name, body in bodies), ("bad", b"no gzip", "text/html", {"Content-Encoding": "gzip"}), gzipped=False))
    inputs = list[dict]()
    documents, rejections = separated(unit_documents(payload_of(tmp_path / "a.warc"), inputs.append))
    assert [own.meta.get("truncated") for own in documents] == ["gzip", None, None]
    assert len(documents[0].text) < len(documents[1].text) == len(documents[2].text)
    assert inputs[0]["truncated"] == 1
    assert [own.reason.partition(":")[0] for own in rejections] == ["the response cannot be decoded"]


def test_pages_that_the_crawler_cut_are_kept_and_counted(tmp_path):
    (tmp_path / "a.warc").write_bytes(archive(RESPONSES[0], gzipped=False, **{"WARC-Truncated": "length"}))
    inputs = list[dict]()
    [document], _ = separated(unit_documents(payload_of(tmp_path / "a.warc"), inputs.append))
    assert document.meta["truncated"] == "length"
    assert any("1 pages were truncated" in own for own in remarks(files_source("a"), files_read(inputs)))


def test_a_record_that_is_too_long_also_unpacked_is_rejected(tmp_path):
    long = b"<p>" + b"a" * 30_000
    (tmp_path / "a.warc.gz").write_bytes(archive(("long", long, "text/html", {}), RESPONSES[0], (
        "packed", gzip.compress(long), "text/html", {"Content-Encoding": "gzip"})))
    documents, rejections = read(tmp_path / "a.warc.gz", max_document_mb=0.02)
    assert texts(documents) == ["Café"] and lost(rejections) == [(3, False), (7, False)]


@pytest.mark.parametrize("gzipped", [False, True])
def test_a_file_that_breaks_off_anywhere_is_damaged_from_there(tmp_path, gzipped):
    path = tmp_path / f"a.warc{'.gz' * gzipped}"
    data = archive(*RESPONSES[:3], gzipped=gzipped)
    borders = [found.start() for found in re.finditer(b"\x1f\x8b\x08" if gzipped else b"WARC/1", data)]
    assert len(borders) == 7
    for number, border in enumerate(borders[2::2]):
        path.write_bytes(data[:border + 40])
        documents, [rejection] = read(path)
        assert len(documents) == number and rejection.lost


def test_files_that_were_appended_to_one_another_are_read_to_the_end(tmp_path):
    (tmp_path / "a.warc.gz").write_bytes(archive(*RESPONSES[:2]) + archive(*RESPONSES[2:4]))
    (tmp_path / "b.warc.gz").write_bytes(gzip.compress(archive(*RESPONSES[:4], gzipped=False)))
    documents, rejections = read(tmp_path / "*")
    assert texts(documents) == ["Café"] * 8 and rejections == []


@pytest.mark.parametrize(("name", "data", "reason"), [
    ("a.warc", b"WARC/1.0 hello\n\nwords", "record 1 has no WARC header"), ("a.warc", b"words", "it is no WARC file"),
    ("a.txt", b"WARC/1.0\r\n", "it is a WARC file; name it .warc, or set the source's `format: warc`"),
    ("a.warc.gz", b"WARC/1.0\r\n", "but it is a WARC file")])
def test_what_is_no_warc_file_is_named(tmp_path, name, data, reason):
    (tmp_path / name).write_bytes(data)
    documents, [rejection] = read(tmp_path / name)
    assert documents == [] and reason in rejection.reason and rejection.lost
