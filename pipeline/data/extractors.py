"""The text of web pages and PDF files, taken out in a process of its own, which `extraction.py` starts.

On some pages the parsers never end, take all memory or crash. A limit of CPU time is the kernel's: it ends a process
wherever it is, and does not depend on what else the machine does.
"""

from __future__ import annotations

import codecs
import logging
import os
import re
import resource
import signal
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import orjson

Extracted = tuple[str, dict[str, Any]]
"""A text, and what is known of it."""
OUT_OF_MEMORY = 3
"""Exit status of the process where a page takes too much memory."""
MARKS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))
BEYOND_ASCII = re.compile(r"[^\x00-\x7f]")
HYPHEN = "\ufffe"
"""What pdfium writes in place of the hyphen and the line end in a divided word."""
DIVIDED = re.compile(f"(?<=[^\\W\\d_])[-\xad\u2010{HYPHEN}]\f(?=[^\\W\\d_])")
"""Where a word is divided at the end of a page."""


class BlankError(Exception):
    """A page has no text."""


def decoded(data: bytes, charset: str) -> str:
    """A page as text: by its byte order mark, the server's charset, as UTF-8, by its own charset, or else the one that
    is detected. If none of these fits, what cannot be decoded becomes U+FFFD."""
    from resiliparse.parse.encoding import bytes_to_str, detect_encoding, map_encoding_to_html5
    marked = next((name for mark, name in MARKS if data.startswith(mark)), None)
    server = map_encoding_to_html5(charset, False) if charset else None
    for name in filter(None, (marked, server, None if data.isascii() else "utf-8", "own")):
        own = detect_encoding(data, from_html_meta=True) if name == "own" else name
        with suppress(LookupError, UnicodeDecodeError):
            return data.decode(own or "utf-8").removeprefix("\ufeff")
    text = bytes_to_str(data, detect_encoding(data) or "utf-8", "replace", ())
    most_broken = 2 * text.count("\ufffd") > len(BEYOND_ASCII.findall(text))  # no UTF-8: what browsers take it for
    return bytes_to_str(data, "cp1252", "replace", ()) if most_broken else text


def of_html(data: bytes, charset: str, extractor: str) -> Extracted:
    """The main text of a page; its title, language and address."""
    from resiliparse.extract.html2text import extract_plain_text
    from resiliparse.parse.html import HTMLTree
    page = decoded(data, charset)
    tree = HTMLTree.parse(page)
    if extractor == "trafilatura":
        import trafilatura  # `deduplicate` would make a page's text depend on the pages before it
        text = trafilatura.extract(page, favor_precision=True, include_comments=False) or ""
    else:
        text = extract_plain_text(tree, main_content=True, alt_texts=False)
    html = tree.document and tree.document.query_selector("html")
    link = tree.head and tree.head.query_selector("link[rel=canonical]")
    return text, {"url": link and link.getattr("href"), "title": tree.title,
                  "language": (html and html.getattr("lang")) or language(text)}


def of_text(data: bytes, charset: str, extractor: str) -> Extracted:
    """Plain text, and its language."""
    text = decoded(data, charset)
    return text, {"language": language(text)}


def of_pdf(data: bytes, charset: str, extractor: str) -> Extracted:
    """The text of all pages of a PDF file; BlankError if it has none."""
    import pypdfium2
    with pypdfium2.PdfDocument(data) as file:
        pages = [page.get_textpage().get_text_range().replace("\r\n", "\n").strip() for page in file]
        title = file.get_metadata_value("Title")
    if not any(pages):
        raise BlankError(f"none of its {len(pages)} pages holds text, as where they are scanned; recognize it first "
                         f"(`ocrmypdf FILE.pdf FILE.pdf`)")
    text = DIVIDED.sub("", "\f".join(filter(None, pages))).replace("\f", "\n").replace(HYPHEN, "")
    return text, {"title": title, "language": language(text), "pages_without_text": pages.count("")}


def language(text: str) -> str:
    """The language of a text as resiliparse detects it; empty if it does not."""
    from resiliparse.parse.lang import detect_fast
    return detect_fast(text)[0].replace("unknown", "")


OF_KIND = {"html": of_html, "text": of_text, "pdf": of_pdf}


def _peak() -> int:
    """The most memory that this process has had, in kB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def serve(seconds: float, megabytes: int) -> None:
    """Answer lists of requests (kind, data, charset, extractor) on the socket at the standard input, one by one, with
    `text` and `meta`, or with the `reason` why there is none."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # of the stage, which ends this process
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    most = megabytes << 20 if hard == resource.RLIM_INFINITY else min(hard, megabytes << 20)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    logging.disable()
    inherited = _peak()  # of the process that started this one
    with Connection(0) as connection, suppress(EOFError, ConnectionError):
        while True:
            try:
                requests = connection.recv()
            except MemoryError:
                os._exit(OUT_OF_MEMORY)
            for kind, *request in requests:
                signal.setitimer(signal.ITIMER_PROF, seconds)
                try:
                    text, about = OF_KIND[kind](*request)
                    answer = orjson.dumps({"text": text, "meta": {key: own for key, own in about.items() if own}})
                except MemoryError:
                    os._exit(OUT_OF_MEMORY)
                except BlankError as error:
                    answer = orjson.dumps({"reason": str(error)})
                except BaseException as error:  # noqa: BLE001 - a panic in Rust is no Exception
                    took_much = _peak() > max(inherited, megabytes << 9)  # more than half
                    limit = f" (memory is limited to {megabytes / 1024:g} GB)" * took_much
                    answer = orjson.dumps({"reason": f"no text can be taken out of it: {str(error)[:100]}{limit}"})
                connection.send_bytes(answer)


if __name__ == "__main__":
    serve(float(sys.argv[1]), int(sys.argv[2]))
