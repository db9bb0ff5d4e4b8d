"""What text a folder holds, in which kinds of files, and which files hold none: for `drover init`.

A kind is what a source of `kind: files` reads with one set of settings. Of very many files some are looked into, the
same ones each time; the others are taken to be as most of these with their ending.
"""

from __future__ import annotations

import codecs
import glob
import json
import math
import os
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

from drover.pipeline.config.data import COMPRESSIONS, WEB, FilesSource, converter, file_format, web_packages
from drover.pipeline.core.console import counted, first, printable
from drover.pipeline.core.errors import UserError, absent
from drover.pipeline.core.folders import files_below, folders_below
from drover.pipeline.data.documents import Limit, Rejection, damage
from drover.pipeline.data.readers import file_records
from drover.pipeline.data.streams import PAGE, UTF8, Input, Piece, mistaken, name_as_text, utf16_order

PACKED = {".gz": 3.0, ".zst": 3.0, ".parquet": 2.0}
"""Bytes of text in a byte of such a file, about."""
READ = 1 << 24
"""Bytes of a text file that are read."""
RECORDS = 100
"""Records of a file that are read."""
MOST_MB = 128.0
"""MB of the largest document, as in shard.max_document_mb."""
TEXT_FIELDS = ("text", "content", "raw_content", "body", "contents", "page_content", "article", "document", "markdown",
               "maintext", "story", "transcript", "message", "code", "abstract")
"""Names of fields that hold a document's text, the usual one first."""
PROSE = 100
"""Characters that a field of another name has on average where it is the text."""
LONG_BYTES = 100e6
"""Text files of more bytes are divided into documents: they would be rejected (shard.max_document_mb) or take much
memory."""
MOST_REASONS = 20
"""So many reasons to leave out files are named."""
PROMPTS = 3
"""The beginnings of so many files are proposed as prompts."""
UNICODE = ((codecs.BOM_UTF32_LE, "utf-32"), (codecs.BOM_UTF32_BE, "utf-32"), (codecs.BOM_UTF16_LE, "utf-16"),
           (codecs.BOM_UTF16_BE, "utf-16"))
"""The encodings that byte order marks show."""
LIKELY = ["cp1250", "cp1251", "koi8_r", "cp932", "euc_jp", "gb18030", "big5", "cp949", "cp1253", "cp1254", "cp1255",
          "cp1256"]
"""Encodings that are guessed where text is not Western."""
LOOKED_INTO = 10_000
"""At most so many files are opened; each ending has its share of them."""
SAMPLES, SAMPLED = 60, 1_200_000
"""The beginnings of about so many files, so many characters in all, are compressed. That shows how much of the text can
be predicted."""
EXTRACTED, SECONDS = 20, 3.0
"""The text of at most so many HTML, WARC and PDF files is extracted, in so much CPU time for a page."""
UNPACKED = 4
"""Bytes in a byte of a packed file of pages, about."""
FEW_NAMES = 20
"""At most so many files without a common ending are listed by name, where other files lie in their folder."""
WORD = re.compile(r"[^\W\d_]{2,15}")
"""What is one id of a vocabulary that is trained until nothing is left to merge, whatever else is."""
BYTES = 256
"""Ids of any vocabulary: the bytes."""
NO_PROSE = re.compile(rb"(\xef\xbb\xbf)?\s*(<\?xml|<svg|-----BEGIN )")
"""How files begin whose text nobody wants to learn: markup, keys and certificates."""
URL = "url"
"""The field of records with a page that names it."""
MBOX = b"\n\nFrom "
"""Between two mails of a file."""


@dataclass(frozen=True)
class FileKind:
    """Settings of a source, where they are not the defaults; `text_field` is empty for text files."""

    format: str = ""
    text_field: str = ""
    encoding: str = "utf-8"
    delimiter: str | None = None
    separator: str | None = None
    html: str = ""
    meta_fields: tuple[str, ...] = ()

    def settings(self) -> dict[str, object]:
        """Those that a configuration has to name."""
        return {name: [*value] if isinstance(value, tuple) else value for name, value in asdict(self).items()
                if value not in ("", "text", UTF8, None, ())}


@dataclass(frozen=True)
class Corpus:
    """Files with text.

    Attributes:
        folder: where they lie.
        sources: for each kind of files `paths`, as globs, and `exclude`: what these match of others.
        places: for each kind the folder that all of its files lie in, or its only file.
        files: how many they are.
        sampled: whether only some of them were opened.
        has_pages: whether text is extracted of some.
        crawled: whether most of the text is that of pages of the web.
        text_bytes: bytes of text in them, about.
        gzip_bits: bits per byte that gzip -9 needs of the beginnings of some.
        ids: of a vocabulary, that the text supports at least, copies or not.
        characters: that are not ASCII, in the beginnings of some.
        prompts: the beginnings of some.
        rejected_share: share of the records that will be rejected, as far as they were looked at.
        remarks: what to know about the files, as lines.
        left_out: which files are left out and why, as lines.
    """

    folder: Path
    sources: Mapping[FileKind, dict[str, list[str]]]
    places: Mapping[FileKind, Path]
    files: int
    sampled: bool
    has_pages: bool
    crawled: bool
    text_bytes: int
    gzip_bits: float
    ids: int
    characters: int
    prompts: list[str]
    rejected_share: float
    remarks: list[str]
    left_out: list[str]


EMPTY = "it is empty"
TEST_SPLIT = "a test split, by its name: what a model is tested on, it should not learn"
DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "config.json")
"""Files in JSON that lie next to the text of data sets or weights."""


@dataclass(frozen=True)
class Beginning:
    """What was looked at of a file: its text, the number of records, and why some of these will be rejected. share: of
    the text in its records, for what is extracted of pages in them."""

    text: str
    records: int = 1
    rejected: Sequence[str] = ()
    share: float = 1.0


class NoTextError(Exception):
    """Why a file is left out."""


def look(folder: Path) -> Corpus:
    """The text in a folder. UserError if there is none."""
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder. Give the folder that holds your text files.")
    folder = folder.resolve()
    closed = list[OSError]()
    paths = sorted(files_below(folder, closed.append))
    tests = _test_split(paths, folder)
    groups = defaultdict[str, list[Path]](list)
    for path in paths:
        groups[_wildcard(path)].append(path)
    most_text = SAMPLED // max(1, min(SAMPLES, len(paths)))
    results = dict[Path, FileKind | str]()
    looked = dict[Path, Beginning]()
    for own in groups.values():
        candidates = [path for path in own if path not in tests]
        chosen = _chosen(candidates, math.ceil(len(candidates) * min(1.0, LOOKED_INTO / len(paths))))
        for path in chosen:
            try:
                results[path], beginning = _kind(path)
            except NoTextError as reason:
                results[path], beginning = str(reason), Beginning("", 0)
            is_sampled = not looked or _checksum(path) % max(1, len(paths) // SAMPLES) == 0
            looked[path] = replace(beginning, text=beginning.text[:most_text * is_sampled])
        for most, _ in Counter(map(results.__getitem__, chosen)).most_common(1):
            results |= dict.fromkeys({*candidates}.difference(chosen), most)
    kinds, left_out = defaultdict[FileKind, list[Path]](list), defaultdict[str, list[Path]](list)
    for path, result in sorted(results.items()):
        (kinds[result] if isinstance(result, FileKind) else left_out[result]).append(path)
    for error in closed:
        left_out[f"a folder that cannot be read: {error.strerror}"].append(Path(error.filename))
    if tests:
        left_out[TEST_SPLIT] = sorted(tests)
    frequent = sorted(left_out, key=lambda reason: (-len(left_out[reason]), reason))
    named = [f"{_shown(left_out[reason], folder)}: {reason}" for reason in frequent[:MOST_REASONS]]
    if more := [path for reason in frequent[MOST_REASONS:] for path in left_out[reason]]:
        named.append(f"{_shown(more, folder)}: other reasons")
    if hidden := _files_with_hidden(folder) - len(paths):
        named.append(counted(hidden, "hidden file"))
    if not kinds:
        raise UserError("\n  ".join([f"{folder} holds no text that Drover reads. It reads text, .jsonl, .json, .csv, "
                                     f".parquet, .arrow, .html, .warc and .pdf, each also with .gz or .zst. Left out:",
                                     *named]))
    is_sample = len(looked) < len(paths) - len(tests)
    of_web = [path for path in kinds.get(FileKind(), ()) if file_format(path) in WEB]
    shares = defaultdict[str, list[float]](list)
    of_ending = defaultdict[str, list[Path]](list)
    for path in of_web:
        of_ending[_ending(path)].append(path)
    for same in of_ending.values():
        for path in _chosen(same, max(1, EXTRACTED // len(of_ending))):
            beginning, share = _pages(path)
            looked[path] = replace(beginning, text=beginning.text[:most_text])
            shares[_ending(path)].append(share)
    with_pages = {path for kind, same in kinds.items() if kind.html for path in same}
    for path in with_pages.intersection(looked):
        shares[_ending(path)].append(looked[path].share * _text_bytes(path) / path.stat().st_size)
    rejecting = {path: own for path, own in looked.items() if own.rejected}
    rejected = sum(len(own.rejected) for own in rejecting.values())
    broken = defaultdict[str, list[tuple[Path, str]]](list)  # by reason, whatever numbers are in it
    for path, beginning in rejecting.items():
        for why in beginning.rejected:
            broken[re.sub(r"\d+", "", why)].append((path, why))
    records = sum(own.records for own in looked.values())
    sorted_kinds = dict(sorted(kinds.items(), key=lambda item: (-len(item[1]), str(item[0]))))
    notes = [f"read as {kind.encoding}, which is a guess: {_shown(own, folder)}"
             for kind, own in sorted_kinds.items() if not kind.encoding.startswith("utf")]
    if is_sample:
        notes.append(f"looked into {len(looked):,} of {len(paths):,} files, the same ones each time; the others are "
                     f"taken to be as most of these with their ending")
    if broken:
        notes.append(f"shard will reject {rejected:,} of {records:,} records that were looked at: " + "; ".join(
            f"{len(alike):,} of {_shown([*dict(alike)], folder)}: {alike[0][1]}" for alike in broken.values()))
    extracted = with_pages.union(of_web)
    sizes = {path: path.stat().st_size * fmean(shares[_ending(path)]) if path in extracted else _text_bytes(path)
             for own in kinds.values() for path in own}
    text_bytes = sum(sizes.values())
    pages = {path for kind, own in kinds.items() if URL in kind.meta_fields for path in own}.union(
        path for path in extracted if file_format(path) != "pdf")
    rejected_bytes = sum(_text_bytes(path) * len(own.rejected) / own.records for path, own in rejecting.items())
    texts = "\n".join(own.text for own in looked.values())
    sample = texts.encode(errors="replace")
    prompts = dict.fromkeys(prompt for own in looked.values() for prompt in _prompt(own.text))
    empty, unread = {*left_out.get(EMPTY, ())}, [_literal(Path(error.filename)) for error in closed]
    return Corpus(folder, {kind: _patterns(folder, {*own}, groups, empty, unread)
                           for kind, own in sorted_kinds.items()},
                  {kind: Path(os.path.commonpath(own)) for kind, own in sorted_kinds.items()},
                  sum(map(len, kinds.values())), is_sample, bool(extracted),
                  2 * sum(map(sizes.__getitem__, pages)) > text_bytes, int(text_bytes),
                  8 * len(zlib.compress(sample, 9)) / max(1, len(sample)),
                  _supported_ids(texts, text_bytes / max(1, len(sample))), sum(not own.isascii() for own in {*texts}),
                  [*prompts][:PROMPTS],
                  max(rejected / max(1, records), rejected_bytes / max(1, text_bytes)), notes, named)


def _supported_ids(sample: str, times: float) -> int:
    """Ids of a vocabulary, at least, that text supports which is so many times as long as a sample: the bytes and the
    words. Their number grows by a power of the text's length (Heaps' law). The power falls, so half of the sample's is
    taken."""
    before, words = (len({*WORD.findall(text)}) for text in (sample[:len(sample) // 2], sample))
    power = math.log2(max(1, words) / max(1, before)) / 2
    return BYTES + int(words * max(1.0, times)**power)


def _chosen(paths: list[Path], count: int) -> list[Path]:
    """So many of some paths: those whose names have the lowest checksums, in the order of the names."""
    return sorted(sorted(paths, key=_checksum)[:count]) if count < len(paths) else paths


def _checksum(path: Path) -> int:
    return zlib.crc32(os.fsencode(path.name))


def _files_with_hidden(folder: Path) -> int:
    """How many files are in a folder and all folders in it, with hidden ones."""
    return sum(not entry.is_dir() for own in folders_below([str(folder)], folder.parents, hidden=True)
               for entry in os.scandir(own))


def _test_split(paths: Sequence[Path], folder: Path) -> set[Path]:
    """The files that are a test split by their names, where others with the same ending are for training."""
    words = {path: set(re.split(r"[\W\d_]+", path.relative_to(folder).as_posix().lower())) for path in paths}
    trained = {_ending(path) for path, own in words.items() if "train" in own}
    return {path for path, own in words.items()
            if _ending(path) in trained and own & {"test", "testing", "eval", "evaluation"}}


def _kind(path: Path) -> tuple[FileKind, Beginning]:
    """What a file is read as, and its beginning; NoTextError if it holds no text."""
    own_format = file_format(path)
    form = own_format or "txt"
    if not path.is_file():
        raise NoTextError("a link that leads nowhere, a pipe or a device")
    if path.name in DESCRIPTIONS and form == "json":
        raise NoTextError("it describes a data set or a model")
    if path.suffix == ".env":
        raise NoTextError("settings for a shell, often with passwords and keys")
    if command := converter(path.with_stem("FILE")):  # one reason for all files of a program
        what = "a notebook" if path.suffix == ".ipynb" else "an office file"
        raise NoTextError(f"{what}; convert it to text first (`{command}`)")
    try:
        if not path.stat().st_size:
            raise NoTextError(EMPTY)
        if form in WEB:
            _refuse_absent(path, _source(path))
            _refuse_mistaken(path, form, UTF8)
            return FileKind(), Beginning("", 0)
        if form in ("parquet", "arrow"):
            return _records_kind(path, form, UTF8)
        if own_format is None:
            _refuse_mistaken(path, form, UTF8)
        with Input(Piece.of(path)).open() as stream:
            data = stream.read(READ)
        if own_format is None and NO_PROSE.match(data):
            raise NoTextError("XML, of which the model would learn the markup (take its text out first), or a key")
        encoding = _encoding(data, form)
        text = codecs.getincrementaldecoder(encoding)("replace").decode(data).removeprefix("\ufeff")
        if not text.strip():
            raise NoTextError(EMPTY)
        if own_format is None and _is_json_lines(text):
            form = "jsonl"
        if form != "txt":
            header = next(iter(text.splitlines()), "")
            return _records_kind(path, form, encoding, _delimiter(path, header) if form == "csv" else None)
        _refuse_mistaken(path, form, encoding)
        separator = None
        if data.startswith(MBOX.lstrip()) and MBOX in data:
            separator = MBOX.decode()
        elif _text_bytes(path) > LONG_BYTES:
            separator = next(own for own in ("\n\n", "\r\n\r\n", "\n") if own.encode(encoding) in data or own == "\n")
        return FileKind("" if own_format else "txt", "", encoding, None, separator), Beginning(text)
    except damage() as error:
        _refuse_mistaken(path, form, UTF8)
        raise NoTextError(f"it cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _source(path: Path, **settings: Any) -> FilesSource:
    return FilesSource(kind="files", name="a", paths=[str(path)], **settings)


def _documents(path: Path, source: FilesSource) -> Beginning:
    """The first documents of a file, as `shard` will read them."""
    from drover.pipeline.data.reading import unit_documents  # not above: it imports numpy

    payload = {"source": source.model_dump(mode="json"), "max_document_mb": MOST_MB, "pieces": [vars(Piece.of(path))]}
    return _beginning([*islice(unit_documents(payload), RECORDS)])


def _beginning(items: Sequence[Any]) -> Beginning:
    return Beginning("\n".join(item[0].text for item in items if not isinstance(item, Rejection)), len(items),
                     [item.reason for item in items if isinstance(item, Rejection)])


def _pages(path: Path) -> tuple[Beginning, float]:
    """Pages at equal distances in a file, so that the largest are among them; bytes of text in a byte of it, about."""
    from drover.pipeline.data.extraction import Extraction, Waiting
    from drover.pipeline.data.reading import file_items  # not above: it imports numpy

    source, limit = _source(path), Limit(MOST_MB)
    file = Input(Piece.of(path))
    distance = 1 + min(READ, file.piece.bytes * (UNPACKED if file.compression else 1)) // RECORDS
    chosen = list[Waiting]()
    at = 0
    for item in file_items(source, file, file_records(file, source, limit), limit, Counter()):
        if isinstance(item, Waiting):
            size = len(item.page.data)
            chosen += [item] * ((at + size) // distance > at // distance)
            at += size
        if file.content > READ:
            break
    read = max(1, file.content)
    file.give_up()
    with Extraction(source.extractor, limit, Counter(), SECONDS) as extraction:
        results = [*extraction.documents(iter(chosen))]
    text_bytes = sum(len(result[0].text.encode()) * max(1, distance / len(item.page.data))
                     for item, result in zip(chosen, results, strict=True) if not isinstance(result, Rejection))
    return _beginning(results), text_bytes / read * file.content / file.piece.bytes


def _is_json_lines(text: str) -> bool:
    """Whether a text begins with two objects in JSON, each in a line of its own."""
    lines = text.split("\n", 2)[:2]
    with suppress(ValueError):
        return len(lines) == 2 and all(isinstance(json.loads(line), dict) for line in lines)
    return False


def _refuse_absent(path: Path, source: FilesSource) -> None:
    for package in web_packages(source, [path.name]):
        for problem in absent("its text", package):
            raise NoTextError(f"{(file_format(path) or 'html').upper()}: {problem}")


def _refuse_mistaken(path: Path, form: str, encoding: str) -> None:
    if (instead := mistaken(Input(Piece.of(path), encoding), form)[0]) is not None:
        raise NoTextError(instead.removesuffix("; leave it out"))


def _delimiter(path: Path, header: str) -> str | None:
    """The delimiter of a CSV file, where it is not the usual one."""
    best = max(",;\t|", key=header.count)
    return None if best not in header or best == ("\t" if ".tsv" in path.name.lower() else ",") else best


def _records_kind(path: Path, form: str, encoding: str, delimiter: str | None = None) -> tuple[FileKind, Beginning]:
    """The kind of a file of records, and its beginning; NoTextError if most cannot be read, or what follows one is
    lost."""
    source = _source(path, format=form, text_field="", encoding=encoding, delimiter=delimiter)
    records, rejected = list[Any](), list[str]()
    for item in islice(file_records(Input(Piece.of(path), encoding), source, Limit(MOST_MB)), RECORDS):
        if not isinstance(item, Rejection):
            records += item[1] if isinstance(item[1], list) else [item[1]]
        elif item.lost:
            raise NoTextError(item.reason)
        else:
            rejected.append(item.reason)
    if not records:
        raise NoTextError(f"no record can be read: {rejected[0]}" if rejected else "it has no record")
    lists = list(_lists(records[0])) if len(records) == 1 else []
    try:
        name = _text_field(records[:RECORDS])
    except NoTextError:
        if not lists:
            raise
        if len(lists) > 1:
            raise NoTextError(f"it holds {len(lists)} lists of records; take out the list that is meant") from None
        records = lists[0]
        name = _text_field(records)
    texts = [text for record in records[:RECORDS] for field, text in _strings(record) if field == name]
    html = "fields" if 2 * sum(PAGE.match(text) is not None for text in texts) > len(texts) else ""
    source = source.model_copy(update={"text_field": name, **({"html": html} if html else {})})
    _refuse_absent(path, source)
    beginning = _documents(path, source)
    beginning = replace(beginning, share=len(beginning.text) / max(1, sum(map(len, texts))) if html else 1.0)
    if 2 * len(beginning.rejected) >= beginning.records:
        raise NoTextError(f"most of its records cannot be read: {', '.join(beginning.rejected[:1])}")
    # Then `drover trace` knows a page by its URL, and the filter `site` its site.
    kept = (URL,) if all(isinstance(record, dict) and URL in record for record in records) else ()
    return FileKind("" if file_format(path) else form, name, encoding, delimiter, None, html, kept), beginning


def _lists(value: Any, depth: int = 8) -> Iterator[list[Any]]:
    """The lists of objects in an object that holds all of a file."""
    for own in value.values() if isinstance(value, dict) and depth else ():
        if isinstance(own, list) and own and isinstance(own[0], dict):
            yield own
        else:
            yield from _lists(own, depth - 1)


def _strings(record: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """The fields of a record that hold text, dotted."""
    for name, value in record.items() if isinstance(record, dict) else ():
        if isinstance(value, bytes) and b"\0" not in value:  # some Parquet files have columns of bytes for text
            with suppress(UnicodeDecodeError):
                yield prefix + name, value.decode()
        elif isinstance(value, str):
            yield prefix + name, value
        elif isinstance(value, dict) and prefix.count(".") < 3:
            yield from _strings(value, f"{prefix}{name}.")


def _text_field(values: Sequence[Any]) -> str:
    """The field with the text of documents, which is in most of these records; NoTextError if there is none."""
    records = [dict(_strings(record)) for record in values]
    counts = Counter(name for record in records for name in record)
    usual = [name for name, count in counts.items() if 2 * count > len(records)]
    for known in TEXT_FIELDS:
        for name in sorted(usual, key=lambda name: (name.count("."), name)):
            if name.rpartition(".")[2] == known:
                return name
    lengths = {name: sum(len(record.get(name, "")) for record in records) / len(records) for name in usual}
    longest = max(usual, key=lambda name: lengths[name], default="")
    if lengths.get(longest, 0) < PROSE:
        raise NoTextError(f"no field holds a document's text: {first(list(counts)) or 'none holds text'}")
    return longest


def _guessed(data: bytes) -> str:
    """The encoding of text that is not UTF-8; NoTextError if none fits."""
    import charset_normalizer
    lines = b"\n".join(line[:1000] for line in data.splitlines() if not line.isascii())[:4096]
    best = next(filter(None, (charset_normalizer.from_bytes(lines, cp_isolation=likely).best()
                              for likely in (["cp1252"], LIKELY))), None)
    if best is None or not _fits(data, best.encoding):
        raise NoTextError("the encoding cannot be guessed; convert it to UTF-8 (iconv)")
    return codecs.lookup(best.encoding).name


def _encoding(data: bytes, form: str) -> str:
    for mark, name in UNICODE:
        if data.startswith(mark):
            return name
    if order := utf16_order(data[:4096]):
        return f"utf-16-{order}"
    if _fits(data, "utf-8") or (b"\0" in data and form != "txt"):
        return "utf-8"
    if b"\0" in data:
        raise NoTextError("binary data, not text: NUL bytes and broken UTF-8")
    text = data.decode("utf-8", "replace")
    broken, others = text.count("\ufffd"), len(re.findall(r"[^\x00-\x7f\ufffd]", text))
    if others < 2 * broken:
        return _guessed(data)
    if form == "txt" or broken * 2 > data.count(b"\n"):
        raise NoTextError("UTF-8 with broken bytes in it; repair it")
    return "utf-8"  # a broken byte costs its record


def _fits(data: bytes, encoding: str) -> bool:
    try:
        codecs.getincrementaldecoder(encoding)().decode(data, final=len(data) < READ)
    except UnicodeError:
        return False
    return True


def _prompt(text: str) -> list[str]:
    """The first words of a text, of its first long line if there is one, which no heading and no advertisement is; []
    where that begins with none."""
    lines = text.strip().splitlines()
    words = next((line for line in lines if len(line) >= PROSE), "".join(lines[:1])).split()[:4]
    return [" ".join(words)] if len(words) == 4 and all(word.isprintable() for word in words) else []


def _text_bytes(path: Path) -> float:
    return path.stat().st_size * math.prod(PACKED.get(suffix.lower(), 1.0) for suffix in path.suffixes[-2:])


def _ending(path: Path) -> str:
    return "".join(path.suffixes[-2:] if path.suffix.lower() in COMPRESSIONS else path.suffixes[-1:])


def _wildcard(path: Path) -> str:
    """A glob of the names of files like this one: with its ending, or, where this shows no format and is rather part of
    a name (`1.`, `mail.2024-06-01`, `README.gz`), with its name."""
    ending = _ending(path)
    by_ending = file_format(path) or (ending not in COMPRESSIONS and re.fullmatch(r"(\.[A-Za-z]\w{0,9}){1,2}", ending))
    return f"*{_literal(ending)}" if by_ending else _literal(path.name)


def _patterns(top: Path, own: set[Path], groups: Mapping[str, Sequence[Path]], empty: set[Path],
              closed: list[str]) -> dict[str, list[str]]:
    """The paths of a kind's files: globs where most of what these match is of the kind, else the files; and what they
    match of others, but for empty files, of which nothing is read. An ending that no other files have is matched in all
    of the folder `top`, so that files which are added anywhere are read.

    closed: folders that cannot be read.
    """
    paths, others, alone = list[str](), list[Path](), defaultdict[Path, list[Path]](list)
    for wildcard, group in groups.items():
        if not (mine := own.intersection(group)):
            continue
        is_own = wildcard.startswith("*") and mine.issuperset({*group} - empty)
        folder = top if is_own else os.path.commonpath([path.parent for path in mine])
        below = {path for path in group if path.is_relative_to(folder)}
        rest = below - own - empty
        if (is_own or len(below) > 1) and len(mine) > len(rest):
            paths.append(f"{_literal(folder)}/**/{wildcard}")
            others += rest
        else:
            for path in mine:
                alone[path.parent].append(path)
    exclude = [*closed] if paths else []
    for parent, few in alone.items():
        rest = {path for group in groups.values() for path in group if path.parent == parent} - own - empty
        if len(few) > (max(FEW_NAMES, len(rest)) if rest else 1):
            paths.append(f"{_literal(parent)}/*")
            others += rest
        else:
            paths += map(_literal, sorted(few))
    exclude += map(_literal, sorted({*others}))
    return {"paths": sorted(paths), **({"exclude": exclude} if exclude else {})}


def _literal(path: Path | str) -> str:
    """A glob of one path; a byte that is not UTF-8, which YAML cannot hold, is any character."""
    return re.sub("[\udc80-\udcff]", "?", glob.escape(str(path)))


def _shown(paths: Sequence[Path], folder: Path) -> str:
    """The first of some files in a folder, for a line of a message."""
    return first([printable(name_as_text(path.relative_to(folder).as_posix())).replace("\n", "\\n") for path in paths])
