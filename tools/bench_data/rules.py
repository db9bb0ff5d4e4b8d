"""Filters and signatures in one process, beside datatrove's."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tools.bench_data.measuring import LeftOut, Row, alternated, rows_of, timed

WORD = re.compile(r"\w+")


def filter_section(texts: list[str], mb: float, place: Path, options: argparse.Namespace) -> list[Row]:
    """Filters of the same rules, in one process. datatrove is given words by one regular expression: its own, spaCy's,
    take longer."""
    from pipeline.config.shipped import FILTERS
    from pipeline.data.documents import Document
    pairs = {"c4": "C4QualityFilter", "gopher_quality": "GopherQualityFilter",
             "gopher_repetition": "GopherRepetitionFilter", "fineweb_quality": "FineWebQualityFilter"}
    there = {kind: theirs for kind, theirs in pairs.items() if kind in FILTERS.shipped}
    if not there:
        raise LeftOut(f"this version of Drover has none of the filters {', '.join(pairs)}")
    documents, rows = [Document(text, "s", str(number), {}) for number, text in enumerate(texts)], []
    for kind, theirs in there.items():
        own = FILTERS.read({"kind": kind})
        contenders = {f"ours, {kind}": timed(partial(_asked, own, documents))}
        beside = f"datatrove, {theirs}"
        try:
            reference = _their_filter(theirs)
            contenders[beside] = timed(partial(_filtered, reference, texts))
        except ImportError as error:
            print(f"  {beside} is left out: {error}")
        rows += rows_of("filters", alternated(contenders, options.rounds), mb, beside)
    return rows


def minhash_section(texts: list[str], mb: float, place: Path, options: argparse.Namespace) -> list[Row]:
    """MinHash signatures with FineWeb's parameters, in one process; words by one regular expression in both."""
    from importlib import import_module
    try:
        signatures: Any = import_module("pipeline.data.planning.signatures").signatures
    except ModuleNotFoundError as error:
        raise LeftOut(f"no near-duplicates in this version of Drover, or a library is missing ({error})") from None
    settings = {"ngram": 5, "bands": 14, "rows": 8, "words": "runs"}
    contenders = {"ours": timed(lambda: [signatures(texts[at:at + 256], settings)
                                          for at in range(0, len(texts), 256)])}
    try:
        contenders["datatrove"] = timed(_their_signatures(texts, place))
    except ImportError as error:
        print(f"  datatrove is left out: {error}")
    return rows_of("minhash", alternated(contenders, options.rounds), mb, "datatrove")


def _plain_words() -> Any:
    """datatrove's idea of a word tokenizer, by regular expressions."""
    from datatrove.utils.word_tokenizers import WordTokenizer

    ways = {"word_tokenize": lambda self, text: WORD.findall(text),
            "sent_tokenize": lambda self, text: [part for part in re.split(r"(?<=[.!?])\s+", text) if part.strip()],
            "span_tokenize": lambda self, text: [found.span() for found in re.finditer(r"[^.!?]+", text)]}
    return type("Plain", (WordTokenizer,), ways)()


def _asked(own: Any, documents: list[Any]) -> list[Any]:
    return [own(document) for document in documents]


def _their_filter(name: str) -> Any:
    from datatrove.pipeline import filters
    return getattr(filters, name)(language=_plain_words())


def _filtered(reference: Any, texts: list[str]) -> list[Any]:
    from datatrove.data import Document
    return [reference.filter(Document(text=text, id=str(number))) for number, text in enumerate(texts)]


def _their_signatures(texts: list[str], place: Path) -> Callable[[], Any]:
    from datatrove.data import Document
    from datatrove.pipeline.dedup import MinhashDedupSignature
    from datatrove.pipeline.dedup.minhash import MinhashConfig
    from datatrove.utils.hashing import HashConfig
    # Its default hash breaks with xxhash 4.
    step = MinhashDedupSignature(str(place / "signatures"), MinhashConfig(hash_config=HashConfig(hash_fc="sha1")),
                                 language=_plain_words())
    documents = [Document(text=text, id=str(number)) for number, text in enumerate(texts)]
    return lambda: step.run(iter(documents), 0, 1)
