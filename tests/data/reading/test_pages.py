"""HTML pages and PDF files: their text is what the libraries give, and pages that end the extractor cost only
themselves."""

import os
import signal
import sys
from collections import Counter

import pytest
import trafilatura
from resiliparse.extract.html2text import extract_plain_text

from drover.pipeline.core.errors import UserError
from drover.pipeline.data import extraction
from drover.pipeline.data.documents import Document, Limit, Page, Rejection
from drover.pipeline.data.extraction import Extraction, Waiting
from drover.pipeline.data.reading import unit_documents
from tests.data.source_files import files_source, payload_of, read, separated, texts, write_jsonl
from tests.refusal import refused

PROSE = "<p>The bridge was closed for repairs, and the ferry took everyone across the river until the spring.</p>" * 4
PAGES = {
    "news": f"<!doctype html><html lang=en-GB><head><title>The bridge</title></head><body><nav><ul><li><a href=/>Home"
            f"</a></ul></nav><article><h1>Closed</h1>{PROSE}</article><aside>Most read</aside><footer>(c)</footer>",
    "forum": f"<html><body><div class=post><b>ann</b>{PROSE}</div><div class=post><b>bob</b><p>Why?</p></div></body>",
    "code": f"<html><body><main><h1>Usage</h1>{PROSE}<pre><code>def f(x):\n    return x &lt; 1\n</code></pre></main>",
    "japanese": "<html lang=ja><body><article>" + "<p>橋は修理のため閉鎖され、船が人々を運んだ。</p>" * 9,
    "arabic": "<html dir=rtl><body><article>" + "<p>أُغلق الجسر للإصلاح، ونقلت العبّارة الجميع عبر النهر.</p>" * 9,
    "table": f"<html><body>{PROSE}<table><tr><th>Year<th>Boats</tr><tr><td>1901<td>3</tr></table></body></html>",
    "broken": f"<html><body><div><p>{PROSE}<b><i>bold</b> both</i><div></p></span><li>item<<p a='1\">end",
    "entities": f"<html><body>{PROSE}<p>&amp;amp; &lt;p&gt; &nbsp;&eacute;&#xe9; &bogus; &#0; &#x110000; &copy 5</p>",
    "fragment": f"<p>A piece of a page.</p>{PROSE}", "words": "No markup at all, but 1 < 2 and a & b.",
    "menu": "<html><body><nav><a href=/>Home</a></nav></body></html>",
    "scripts": f"<html><head><script>var a = '<p>no</p>';</script><style>p {{}}</style></head><body>{PROSE}<noscript>x"}
ENDLESS = "<div>" * 9000
"""resiliparse needs time with the square of the depth."""


@pytest.mark.parametrize("form", ["files", "fields"])
@pytest.mark.parametrize("extractor", ["resiliparse", "trafilatura"])
def test_texts_are_those_of_the_library(tmp_path, form, extractor):
    if form == "files":
        for name, page in PAGES.items():
            (tmp_path / f"{name}.html").write_text(page)
    else:
        write_jsonl(tmp_path / "a.jsonl", [{"id": name, "html": page} for name, page in sorted(PAGES.items())])
    fields = {} if form == "files" else {"html": "fields", "text_field": "html", "id_field": "id"}
    documents, rejections = read(files_source(tmp_path / "*", extractor=extractor, **fields))
    assert rejections == [] and [own.id.removesuffix(".html") for own in documents] == sorted(PAGES)
    for name, text in zip(sorted(PAGES), texts(documents), strict=True):
        page = PAGES[name]
        assert text == (extract_plain_text(page, main_content=True, alt_texts=False) if extractor == "resiliparse" else
                        trafilatura.extract(page, favor_precision=True, include_comments=False) or ""), name
    assert [own.meta for own in documents if "news" in own.id] == [{"title": "The bridge", "language": "en-GB"}]
    assert "The bridge was closed" in "".join(texts(documents))


def test_what_a_page_says_fills_the_fields_that_a_record_lacks(tmp_path):
    page = "<html lang=en><title>Own</title><p>words"
    write_jsonl(tmp_path / "a.jsonl", [{"text": page, "title": title, "url": "u"} for title in ("Given", None)])
    fields = Counter()
    documents, _ = separated(unit_documents(payload_of(tmp_path / "a.jsonl", html="fields",
                                                       meta_fields=["title", "url"]), fields=fields))
    assert [own.meta for own in documents] == [{"title": title, "url": "u", "language": "en"}
                                               for title in ("Given", "Own")]
    assert fields == {"title": 2, "url": 2, "language": 2}


@pytest.mark.parametrize(("encoding", "meta"), [
    ("utf-8", ""), ("utf-8-sig", ""), ("utf-16", ""), ("cp1252", "windows-1252"), ("cp1252", ""), ("cp1252", "utf-8"),
    ("shift_jis", "shift_jis"), ("shift_jis", ""), ("koi8-r", "koi8-r"), ("koi8-r", "no-such-charset")])
def test_the_charset_of_a_page_is_found(tmp_path, encoding, meta):
    words = {"shift_jis": "橋は修理のため閉鎖された。", "koi8-r": "Мост был закрыт на ремонт, и паром возил всех."}
    sentence = words.get(encoding, "größer, früher, über") * 9
    page = f"<html><head>{f'<meta charset={meta}>' * bool(meta)}</head><body><p>{sentence}</p></body></html>"
    (tmp_path / "a.html").write_bytes(page.encode(encoding))
    assert texts(read(tmp_path / "a.html")[0]) == [sentence]


def test_no_file_of_the_current_folder_is_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("orjson", "logging", "drover", "resiliparse"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(1)")
    (tmp_path / "a.html").write_text("<p>words")
    assert texts(read(tmp_path / "a.html")[0]) == ["words"]


def test_a_broken_byte_costs_only_itself(tmp_path):
    (tmp_path / "a.html").write_bytes("<p>größer, früher, ".encode() + b"\xff" + "öfter</p>".encode())
    assert texts(read(tmp_path / "a.html")[0]) == ["größer, früher, \ufffdöfter"]


@pytest.mark.parametrize(("limits", "page", "reason"), [
    ({"SECONDS": 0.5}, ENDLESS, "its text is not found within 0.5 s of CPU time"),
    ({"MEGABYTES": 96}, "<p>a<b>b" * 200_000, "no text can be taken out of it: "),
    ({"MEGABYTES": 96}, "<p>" + "a" * 60_000_000, "to find its text takes more than 0.09375 GB of memory")])
def test_a_page_that_takes_too_much_is_rejected_and_no_other(tmp_path, monkeypatch, limits, page, reason):
    for name, value in limits.items():
        monkeypatch.setattr(extraction, name, value)
    for number in range(5):
        (tmp_path / f"{number}.html").write_text(page if number in (2, 4) else f"<p>page {number}</p>")
    documents, rejections = read(tmp_path / "*.html")
    assert texts(documents) == ["page 0", "page 1", "page 3"]
    assert [(own.file, own.lost_bytes, own.reason[:len(reason)]) for own in rejections] == [
        (f"{number}.html", len(page), reason) for number in (2, 4)]


STAND_IN = """
import os, signal, sys
from drover.pipeline.data import extractors
def of_text(data, charset, extractor):
    if data == b"memory":
        raise MemoryError
    if data.startswith(b"SIG"):
        os.kill(os.getpid(), getattr(signal, data.decode()))
    return str(os.getpid()), {}
extractors.OF_KIND["text"] = of_text
extractors.serve(30.0, 2048)
"""


@pytest.fixture
def texts_of(monkeypatch):
    """What becomes of pages, which the stand-in takes for signals that it sends itself."""
    start = extraction.subprocess.Popen
    monkeypatch.setattr(extraction.subprocess, "Popen", lambda _, stdin: start([sys.executable, "-c", STAND_IN],
                                                                               stdin=stdin))

    def texts_of(*pages):
        none = Rejection("s", "f", None, "")
        with Extraction("", Limit(1.0), Counter()) as process:
            return [own.reason if isinstance(own, Rejection) else own[0].text for own in process.documents(
                iter([Waiting(Document("", "s", "f", {}), Page(page, "text"), none) for page in pages]))]
    return texts_of


def test_a_page_is_rejected_if_it_ends_a_new_process_too(texts_of):
    first, memory, second, crash, *rest = texts_of(b"a", b"memory", b"a", b"SIGSEGV", *[b"a"] * 200)
    assert memory == "to find its text takes more than 2 GB of memory"
    assert crash == "the extractor crashes on it (SIGSEGV), or needs more than 2 GB of memory"
    assert len({first, second, *rest}) == 3 and len({*rest}) == 1 and str(os.getpid()) not in rest


def test_a_signal_from_outside_is_no_rejection(texts_of):
    assert len({*texts_of(b"a", b"SIGTERM", b"SIGINT", b"SIGUSR1")}) == 1  # as Slurm sends all processes of a job
    refused(UserError, "ended .status -9., as the kernel does when memory runs out", texts_of, b"a", b"SIGKILL")
    assert signal.SIGKILL not in extraction.CRASHES
