"""WARC and WET files, the archives of crawlers: the responses with pages as records; all other records are counted by
what they are.

Headers are read here: fastwarc takes no line ends without CR, and no other spelling of `Content-Length`.
"""

from __future__ import annotations

import io
import re
import zlib
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import IO

from drover.pipeline.config.data import FilesSource
from drover.pipeline.data.documents import Limit, Page, Records
from drover.pipeline.data.streams import CHUNK, Input
from drover.pipeline.storage.store import BlockStream

KINDS = {"text/html": "html", "application/xhtml+xml": "html", "text/plain": "text", "application/pdf": "pdf"}
"""Types of content with text, and how it is taken out."""
ABOUT = ("warcinfo", "request", "metadata")
"""Types of records that say how others came about, and are only counted."""
SHOWN = 100
"""Characters of an error of a library, which may hold all of a page."""
LONGEST_LINE = 1 << 16
"""Bytes of a header's line."""
ANY_HEADER = zlib.MAX_WBITS | 32
"""Lets zlib find out whether data has a header of gzip or of zlib."""
DEFLATE = 8
"""The lower half of the first byte of a zlib header; `deflate` without one is what browsers read, too."""
STATUS = re.compile(rb"HTTP/[\d.]+ +(\d+)")
CHARSET = re.compile(r"""charset\s*=\s*["']?([^\s"';,]+)""", re.IGNORECASE)


def warc_records(file: Input, source: FilesSource, limit: Limit) -> Records:
    """The pages of the file, numbered as its records are, and what is none; `file.about` counts that."""
    passed = file.about.passed_over = Counter[str]()
    number = size = 0
    file.current = lambda: size
    opened = file.open()
    blocks = (block for block in iter(partial(opened.read1, CHUNK), b""))  # so that nothing before damage is lost
    with io.BufferedReader(BlockStream(blocks, opened), CHUNK) as stream:
        while line := stream.readline(LONGEST_LINE):
            if not line.strip():
                continue
            number += 1
            headers = _headers(stream)
            length = headers.get("content-length", "")
            if not (line.startswith(b"WARC/") and length.isdecimal()):
                raise EOFError(f"record {number} has no WARC header with a Content-Length, or it breaks off")
            size = int(length)
            url = headers.get("warc-target-uri", "")
            if size > limit.bytes:
                left = size
                while left and (part := stream.read(min(CHUNK, left))):
                    left -= len(part)
                yield file.reject(number, limit.reason, lost_bytes=size - left, url=url)
                continue
            data = stream.read(size)
            if len(data) < size:
                raise EOFError(f"record {number} breaks off")
            try:
                page = _page(headers, data, limit.bytes + 1)
            except (OSError, ValueError, zlib.error) as error:
                reason = f"the response cannot be decoded: {str(error)[:SHOWN]}"
                yield file.reject(number, reason, lost_bytes=size, url=url)
                continue
            if isinstance(page, str):
                passed[page] += 1
                if headers.get("warc-type") not in ABOUT:
                    yield file.reject(number, page, 0, url=url)
            elif len(page.data) > limit.bytes:
                yield file.reject(number, limit.reason, lost_bytes=size, url=url)
            else:
                file.about.truncated += "truncated" in page.meta
                is_kept = page.kind == "html" and source.html == "keep"
                yield number, replace(page, kind="text") if is_kept else page


def _headers(stream: IO[bytes]) -> dict[str, str]:
    """Header fields by their names in lower case, up to an empty line; none if they break off before one."""
    fields = dict[str, str]()
    while (line := stream.readline(LONGEST_LINE)).strip():
        name, _, value = line.decode("utf-8", "replace").partition(":")
        fields[name.strip().lower()] = value.strip()
    return fields if line else {}


def _page(headers: dict[str, str], data: bytes, most: int) -> Page | str:
    """The page in a record's content, unpacked up to so many bytes, or what it is instead; an
    error of what decodes it if it is damaged."""
    kind = headers.get("warc-type")
    if kind not in ("response", "resource", "conversion"):
        return f"of type {kind}"
    content = headers.get("content-type", "")
    codings = cut = ""
    if content.startswith("application/http"):
        response = io.BytesIO(data)
        status = STATUS.match(response.readline())
        if status is None or status[1][:1] != b"2":
            return f"with HTTP status {status[1].decode() if status else 'unknown'}"
        http = _headers(response)
        content = http.get("content-type", "")
        codings = f"{http.get('content-encoding', '')} {http.get('transfer-encoding', '')}".lower()
        data = response.read()
    kind = (headers.get("warc-identified-payload-type") or content).partition(";")[0].strip().lower()
    if kind not in KINDS:
        return f"with content of type {kind or 'unknown'}"
    for coding in reversed(re.findall(r"[^\s,]+", codings)):
        data, is_complete = _unpacked(data, coding, most)
        cut = cut if is_complete else coding
    known = {"url": headers.get("warc-target-uri"), "date": headers.get("warc-date"),
             "truncated": headers.get("warc-truncated") or cut}
    return Page(data, KINDS[kind], "".join(CHARSET.findall(content)[:1]),
                {name: value for name, value in known.items() if value})


def _unpacked(data: bytes, coding: str, most: int) -> tuple[bytes, bool]:
    """Content without a coding, up to so many bytes, and whether it is whole. What is no coding (`identity`, `utf-8`)
    is passed over, as browsers do."""
    if coding == "chunked":
        return _unchunked(io.BytesIO(data))
    if coding in ("br", "zstd"):
        from fastwarc.stream_io import BrotliReader, ZstdReader
        data = (BrotliReader if coding == "br" else ZstdReader)(io.BytesIO(data)).read(most)
    elif coding in ("gzip", "x-gzip", "deflate"):
        is_raw = coding == "deflate" and data and data[0] % 16 != DEFLATE
        stream = zlib.decompressobj(-zlib.MAX_WBITS if is_raw else ANY_HEADER)
        content = stream.decompress(data, most)
        return content, stream.eof or len(content) == most
    return data, True


def _unchunked(stream: IO[bytes]) -> tuple[bytes, bool]:
    """What was sent in chunks, and whether the last one is there."""
    chunks = list[bytes]()
    size = -1
    while size and (line := stream.readline()):
        size = int(line.partition(b";")[0], 16)
        chunks.append(stream.read(size))
        stream.readline()
    return b"".join(chunks), not size
