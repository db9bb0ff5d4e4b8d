"""WARC and WET files, the archives of crawlers: the responses with pages as records; all other records are counted by
what they are."""

from __future__ import annotations

import io
import zlib
from collections import Counter
from dataclasses import replace
from typing import Any, Literal

from drover.pipeline.config.data import FilesSource
from drover.pipeline.data.documents import Limit, Page, Records
from drover.pipeline.data.streams import CHUNK, Input

KINDS = {"text/html": "html", "application/xhtml+xml": "html", "text/plain": "text", "application/pdf": "pdf"}
"""Types of content with text, and how it is taken out."""
SHOWN = 100
"""Characters of an error of a library, which may hold all of a page."""


class _Stream(io.BufferedIOBase):
    """What fastwarc reads: as much at a time as there is, so that nothing before damage is lost."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._at = 0

    def read(self, size: int | None = CHUNK) -> bytes:
        data: bytes = self._stream.read1(size)
        self._at += len(data)
        return data

    def tell(self) -> int:
        return self._at


def warc_records(file: Input, source: FilesSource, limit: Limit) -> Records:
    """The pages of the file, numbered as its records are. `file.about` counts the others.

    A response is parsed apart from the file, in which an error would end the reading.
    """
    from fastwarc.warc import ArchiveIterator
    passed = file.about.passed_over = Counter[str]()
    size = 0
    file.current = lambda: (size, False)
    with file.open() as stream:
        for number, record in enumerate(ArchiveIterator(_Stream(stream), parse_http=False), 1):
            if "Content-Length" not in record.headers:
                raise EOFError(f"the header of record {number} breaks off")
            size = record.content_length
            if size > limit.bytes:
                yield file.reject(number, limit.reason, lost_bytes=size)
                continue
            data = record.reader.read()
            if len(data) < size:
                raise EOFError(f"record {number} breaks off")
            try:
                page = _page(record, data, limit.bytes + 1)
            except OSError as error:
                reason = f"the response cannot be decoded: {str(error)[:SHOWN]}"
                yield file.reject(number, reason, lost_bytes=size)
                continue
            if isinstance(page, str):
                passed[page] += 1
            elif len(page.data) > limit.bytes:
                yield file.reject(number, limit.reason, lost_bytes=size)
            else:
                file.about.truncated += "truncated" in page.meta
                is_kept = page.kind == "html" and source.html == "keep"
                yield number, replace(page, kind="text") if is_kept else page


def _page(record: Any, data: bytes, most: int) -> Page | str:
    """The page in a record's content, unpacked up to so many bytes, or what it is instead; OSError if it is damaged."""
    headers = record.headers
    kind = headers.get("WARC-Type")
    if kind not in ("response", "resource", "conversion"):
        return f"of type {kind}"
    content = headers.get("Content-Type", "")
    charset = cut = ""
    if record.is_http:
        response = _response(data, "transfer")
        status = response.http_headers.status_code or 0
        if not 200 <= status < 300:
            return f"with HTTP status {status}"
        content = response.http_content_type or ""
        charset = response.http_charset or ""
        coding = response.http_headers.get("Content-Encoding", "").strip().lower()
        if coding in ("gzip", "x-gzip"):
            data, cut = _inflated(response.reader.read(), most)
        else:
            data = (_response(data, "all") if coding else response).reader.read(most)
    content = (headers.get("WARC-Identified-Payload-Type") or content).partition(";")[0].strip().lower()
    if content not in KINDS:
        return f"with content of type {content or 'unknown'}"
    known = {"url": headers.get("WARC-Target-URI"), "date": headers.get("WARC-Date"),
             "truncated": headers.get("WARC-Truncated") or cut}
    return Page(data, KINDS[content], charset, {name: value for name, value in known.items() if value})


def _response(data: bytes, decode: Literal["transfer", "all"]) -> Any:
    """An HTTP response with its headers parsed, whose content is read without these codings."""
    from fastwarc.warc import WarcRecord
    response = WarcRecord()
    response.is_http = True
    response.set_bytes_content(data)
    response.parse_http(auto_decode=decode)
    return response


def _inflated(data: bytes, most: int) -> tuple[bytes, str]:
    """What was gzipped, up to so many bytes, and "gzip" if it breaks off, which fastwarc does not see; OSError if it is
    damaged."""
    stream = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    try:
        content = stream.decompress(data, most)
    except zlib.error as error:
        raise OSError(str(error)) from None
    return content, "" if stream.eof or len(content) == most else "gzip"
