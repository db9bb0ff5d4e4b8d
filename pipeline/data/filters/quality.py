"""Words and sentences as the quality filters count them, and the marks that end a sentence or are no word.

datatrove's rules are thresholds on the words of spaCy's English tokenizer. These are nearly the same words, at many
times the speed: what white space separates is cut once and remembered. Quotes, brackets, marks and the full stop come
off both ends, and 's and n't off the end; hyphens, slashes, commas and the like divide letters from letters. So 1.10,
--opt and foo.c stay whole. What spaCy only knows by lists (abbreviations beyond the commonest, emoticons) is left out.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import lru_cache
from itertools import chain
from typing import Annotated

from pydantic import Field

from drover.pipeline.data.documents import Document
from drover.pipeline.data.filters.base import Filter

_MARK = r"[,:;!?¿¡()\[\]{}<>_#*&'\"”“`‘´’‚„»«…—–$£€¥©®°¦§\u060c\u061b\u061f\u066a\u06d4\u0964\u00b7"  \
        r"\u2030-\u205e\u2100-\u2bff\u3001-\u301f\uff01-\uff0c\uff1a-\uff1f\uff5e\U0001f000-\U0001faff]"
_FACE = r"\)-?:|[(\[]-?[:;=]|[:;=]['’]?-?[)\](*/|]|''"
_BEFORE = re.compile(rf"{_FACE}|{_MARK}|[%=]|\+(?!\d)|\.\.+")
_AFTER = re.compile(rf"(?:{_FACE}|{_MARK}|['’][sS]|\.\.+|(?<=\d)\+|(?<=\d)(?:[kcdmµn]?m|ha|[kmµ]?g|t|[kmgt]b|[KMGT]B"
                    r"|[TGMK]|kmh|mph|hPa|Pa|mbar|%|in|ft|yd|lb|oz)|(?<=[0-9a-zß-öø-ÿ%²\-+…,:;!?()\[\]{}<>_#*&'\"”“`‘´’‚„»«])\."
                    r"|(?<=[A-Z][A-Z])\.)\Z")
_BETWEEN = re.compile(r"(\.\.+|…|[\u2190-\u2bff©®°]|(?<=\d)[+\-*^](?=[\d-])|(?<=[a-z'\"”’`])\.(?=[A-Z'\"“‘`])"
                      r"|(?<=[^\W\d_]),(?=[^\W\d_])|(?<=[^\W_])(?:--+|[-–—~])(?=[^\W\d_])"
                      r"|(?<=[^\W_])[:<>=/](?=[^\W\d_]))")
_UNCUT = re.compile(r"(?:[A-Za-z]\.)+\Z|(?:Mr|Mrs|Ms|Dr|St|Prof|Jr|Sr|vs|Inc|Ltd|Co|Corp|Jan|Feb|Aug|Sept?|Oct|Nov|Dec"
                    r"|Gen|Gov|Rep|Rev|Sen|Bros)\.\Z|\\[nt]\Z|C\+\+\Z|and/or\Z|''\Z|['’](?:s|S|d|ll|re|ve|em|cause|til)\Z"
                    rf"|(?:{_FACE})\Z")
_URL = re.compile(r"(?:[\w+.-]{2,}://)?(?:[^\s/]+@)?(?:[A-Za-z0-9][\w-]*\.)+[a-z]{2,24}(?::\d{2,5})?(?:[/?#]\S*)?\Z")
_CONTRACTED = re.compile(r"(?i)(?:(ca|wo|do|does|did|is|are|was|were|has|have|had|could|would|should|must|need|ai)"
                         r"(n['’]?t)|(i|you|s?he|it|we|they|that|there|th[eo]se|this|who|what|where|when|why|how|could"
                         r"|would|should|might|must)(['’](?:ll|re|ve|d|m))|(can)(not))\Z")
_LONGEST_END, _SHORT_PART = 8, 256
"""Characters of the longest match of _AFTER; texts without longer parts are cut with a memory of those seen."""
# From the beginning of a run of marks only, and without going back: linear in any text.
_SENTENCE_END = re.compile(r"(?<![.!?…。！？।؟])[.!?…。！？।؟]++[\"'”’)\]]*+(?=\s++\S)")


def _characters(ranges: str) -> frozenset[str]:
    """The characters of ranges of code points in hexadecimal, both ends included."""
    bounds = ((int(first, 16), int(last or first, 16)) for first, _, last in
              (part.partition("-") for part in ranges.split()))
    return frozenset(chr(code) for first, last in bounds for code in range(first, last + 1))


TERMINAL = _characters(
    "21 2e 3f 589 61d-61f 6d4 700-702 7f9 837 839 83d-83e 964-965 104a-104b 1362 1367-1368 166e 1735-1736 17d4-17d6 "
    "17d9-17da 1803 1809 1944-1945 1aa8-1aab 1b5a-1b5b 1b5e-1b5f 1b7d-1b7e 1c3b-1c3c 1c7e-1c7f 203c-203d 2047-2049 "
    "2e2e 2e3c 2e53-2e54 3002 a4ff a60e-a60f a6f3 a6f7 a876-a877 a8ce-a8cf a92f a9c8-a9c9 aa5d-aa5f aaf0-aaf1 abeb "
    "fe52 fe56-fe57 ff01 ff0e ff1f ff61 10a56-10a57 10f55-10f59 10f86-10f89 11047-11048 110be-110c1 11141-11143 "
    "111c5-111c6 111cd 111de-111df 11238-11239 1123b-1123c 112a9 1144b-1144c 115c2-115c3 115c9-115d7 11641-11642 "
    "1173c-1173e 11944 11946 11a42-11a43 11a9b-11a9c 11c41-11c42 11ef7-11ef8 11f43-11f44 16a6e-16a6f 16af5 "
    "16b37-16b38 16b44 16e98 1bc9f 1da88")
"""Characters that end a sentence in any script: FineWeb's (Unicode's Sentence_Terminal of an older version, and Khmer's
signs)."""
NO_WORD = TERMINAL | _characters(
    "0-8 b-1f 22-2d 2f 3a-3e 40 5b-60 7b-9f ab b4 bb 2013-2014 2019 201c-201e 2026 2236 2501 25ba 3001 3008-300d "
    "3010-3011 ff05 ff08-ff09 ff0c ff11 ff1a-ff1b ff5e")
"""Characters of which alone no word is made, in Gopher's count of words: FineWeb's list, which goes back to CCNet's."""


@lru_cache(maxsize=1)  # the filters of a chain ask in turn for the words of one document
def words(text: str) -> list[str]:
    """The words of a text in order. Not to be changed: the list is shared."""
    parts = text.split()
    return list(chain.from_iterable(map(_remembered if max(map(len, parts), default=0) < _SHORT_PART else _cut, parts)))


def _cut(part: str) -> tuple[str, ...]:
    """The words of what stands between white space."""
    if part.isalpha() and part[-1] not in "Tt":  # no contraction such as dont
        return (part,)
    before, after, start, end = list[str](), list[str](), 0, len(part)
    while not (_UNCUT.match(part, start, end) or _CONTRACTED.match(part, start, end)):
        if match := _BEFORE.match(part, start, end):
            before.append(match[0])
            start = match.end()
        elif match := _AFTER.search(part, max(start, end - _LONGEST_END), end):
            after.append(match[0])
            end = match.start()
        else:
            break
    inside = [part[start:end]]
    if match := _CONTRACTED.match(inside[0]):
        inside = [*match.groups()]
    elif not (_UNCUT.match(inside[0]) or _URL.match(inside[0])):
        inside = _BETWEEN.split(inside[0])
    return (*before, *filter(None, inside), *reversed(after))


_remembered = lru_cache(maxsize=1 << 16)(_cut)


@lru_cache(maxsize=1)
def word_counts(text: str) -> Counter[str]:
    """How often each word occurs in a text, in the order of first occurrence. Do not change it: it is cached."""
    return Counter(words(text))


def sentences(text: str) -> int:
    """How many sentences there are in a text.

    One ends at marks such as . ! ? with the quotes and brackets that close behind them, before white space; what
    follows the last such place is one more.
    """
    return 1 + sum(1 for _ in _SENTENCE_END.finditer(text))


_CITATION = re.compile(r"\[(?:\d*|edit|citation needed)\]")
_ENDS = (".", "?", "!", '"', "'")
_POLICIES = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")


class C4(Filter):
    """Takes lines that are no prose out of documents, and drops documents of which too little is left, or that hold
    code or a dummy text (Raffel et al. 2020, section 2.2).

    Settings, defaults and the order of the rules are those of datatrove's C4QualityFilter, with split_paragraph;
    null leaves a rule out. Lines that stay lose the white space around them.
    """

    remove_citations: bool = True
    """Take out marks such as [12], [edit] and [citation needed]."""
    filter_no_terminal_punct: bool = True
    """Take out lines that do not end with one of . ? ! " ', or that end with three dots."""
    min_num_sentences: int | None = Field(5, gt=0)
    """Sentences that are left at least."""
    min_words_per_line: int | None = Field(3, gt=0)
    """Take out lines with fewer words (what white space separates, before citations go)."""
    max_word_length: int | None = Field(1000, gt=0)
    """Take out lines with a longer word."""
    filter_lorem_ipsum: bool = True
    """Drop documents with "lorem ipsum" in a line that is not taken out for its form."""
    filter_javascript: bool = True
    """Take out lines that name JavaScript."""
    filter_curly_bracket: bool = True
    """Drop documents with { in a line that is not taken out for its form or for JavaScript."""
    filter_policy: bool = True
    """Take out lines about cookies, privacy policies and terms of use."""

    def __call__(self, document: Document) -> Document | str:
        number, kept = 0, []
        for raw in document.text.splitlines():
            if (line := self._in_form(raw.strip())) is None:
                continue
            lowered = line.lower()
            if self.filter_lorem_ipsum and "lorem ipsum" in lowered:
                return "lorem ipsum"
            if self.filter_javascript and "javascript" in lowered:
                continue
            if self.filter_curly_bracket and "{" in line:
                return "a curly bracket"
            if self.filter_policy and any(policy in lowered for policy in _POLICIES):
                continue
            if self.min_num_sentences and number < self.min_num_sentences:  # more need not be counted
                number += sentences(line)
            kept.append(line)
        if self.min_num_sentences and number < self.min_num_sentences:
            return f"fewer than {self.min_num_sentences:,} sentences are left"
        text = "\n".join(kept).strip()
        return document.with_text(text)

    def _in_form(self, line: str) -> str | None:
        """A line without citations; None where its form is not that of prose."""
        bare = _CITATION.sub("", line) if self.remove_citations and "[" in line else line
        if self.filter_no_terminal_punct and (not bare.endswith(_ENDS) or bare.endswith("...")):
            return None
        if self.min_words_per_line and len(line.split(None, self.min_words_per_line)) < self.min_words_per_line:
            return None
        if (most := self.max_word_length) and len(line) > most and any(len(word) > most for word in line.split()):
            return None
        return bare


Ratio = Annotated[float | None, Field(gt=0)]


class GopherQuality(Filter):
    """Drops documents that break a rule of quality of Gopher (Rae et al. 2021, appendix A1.1).

    Settings, defaults and the order of the rules are those of datatrove's GopherQualityFilter; null leaves a rule out.
    The stop words are English: give those of your language, or null for min_stop_words.
    """

    min_doc_words: int | None = Field(50, gt=0)
    """Words that a document has at least. Those of nothing but punctuation do not count, here and for the lengths."""
    max_doc_words: int | None = Field(100_000, gt=0)
    """Words that a document has at most."""
    min_avg_word_length: Ratio = 3
    """Characters of a word, on average, at least."""
    max_avg_word_length: Ratio = 10
    """Characters of a word, on average, at most."""
    max_symbol_word_ratio: Ratio = 0.1
    """The signs # for each word, punctuation included, and the ellipses (... or …), at most."""
    max_bullet_lines_ratio: Ratio = 0.9
    """Share of lines that begin with • or - at most."""
    max_ellipsis_lines_ratio: Ratio = 0.3
    """Share of lines that end in an ellipsis at most."""
    min_alpha_words_ratio: Ratio = 0.8
    """Share of words, punctuation included, that have a letter at least. datatrove calls it
    max_non_alpha_words_ratio."""
    min_stop_words: int | None = Field(2, gt=0)
    """How many of the stop_words occur at least."""
    stop_words: list[str] = ["the", "be", "to", "of", "and", "that", "have", "with"]
    """Words of which min_stop_words are in any prose of the language, as they are written."""

    def __call__(self, document: Document) -> Document | str:
        return self._of_words(document.text) or self._of_lines(document.text) or self._of_letters(document.text) \
            or document

    def _of_words(self, text: str) -> str | None:
        counts = word_counts(text)
        words = sum(counts.values())
        number = characters = 0
        for word, count in counts.items():
            if not NO_WORD.issuperset(word):
                number += count
                characters += count * len(word)
        if self.min_doc_words and number < self.min_doc_words:
            return f"fewer than {self.min_doc_words:,} words"
        if self.max_doc_words and number > self.max_doc_words:
            return f"more than {self.max_doc_words:,} words"
        if number and self.min_avg_word_length and characters / number < self.min_avg_word_length:
            return f"words shorter than {self.min_avg_word_length:g} characters on average"
        if number and self.max_avg_word_length and characters / number > self.max_avg_word_length:
            return f"words longer than {self.max_avg_word_length:g} characters on average"
        if (most := self.max_symbol_word_ratio) and text.count("#") / words > most:
            return f"more than {most:g} # for each word"
        if most and (text.count("...") + text.count("…")) / words > most:
            return f"more than {most:g} ellipses for each word"
        return None

    def _of_lines(self, text: str) -> str | None:
        lines = text.splitlines()
        if most := self.max_bullet_lines_ratio:
            bullets = sum(line.lstrip().startswith(("•", "-")) for line in lines) if "•" in text or "-" in text else 0
            if bullets / len(lines) > most:
                return f"more than {most:g} of the lines begin with a bullet"
        if most := self.max_ellipsis_lines_ratio:
            ends = sum(line.rstrip().endswith(("...", "…")) for line in lines) if "..." in text or "…" in text else 0
            if ends / len(lines) > most:
                return f"more than {most:g} of the lines end in an ellipsis"
        return None

    def _of_letters(self, text: str) -> str | None:
        counts = word_counts(text)
        if least := self.min_alpha_words_ratio:
            lettered = sum(count for word, count in counts.items()
                           if word.isalpha() or any(map(str.isalpha, word)))
            if lettered / sum(counts.values()) < least:
                return f"fewer than {least:g} of the words have a letter"
        if self.min_stop_words and sum(word in counts for word in set(self.stop_words)) < self.min_stop_words:
            return f"fewer than {self.min_stop_words:,} of the stop words"
        return None


class FinewebQuality(Filter):
    """Drops documents whose lines are those of lists, menus and tables (Penedo et al. 2024, section 3.6).

    Settings, defaults and the order of the rules are those of datatrove's FineWebQualityFilter. Blank lines do not
    count.
    """

    line_punct_thr: float = Field(0.12, ge=0, le=1)
    """Least share of lines that end a sentence: their last character is a terminal mark of any script."""
    line_punct_exclude_zero: bool = False
    """Let documents pass that have no such line at all."""
    short_line_thr: float = Field(0.67, ge=0, le=1)
    """Largest share of lines that have short_line_length characters or fewer."""
    short_line_length: int = Field(30, ge=0)
    """Most characters of a short line."""
    char_duplicates_ratio: float = Field(0.01, ge=0, le=1)
    """Largest share of characters in lines that repeat an earlier line."""
    new_line_ratio: float = Field(0.3, ge=0)
    """Most line ends for each word."""

    def __call__(self, document: Document) -> Document | str:
        text = document.text
        lines = [line for line in text.split("\n") if line and not line.isspace()]
        ended = sum(line[-1] in TERMINAL for line in lines) / len(lines)
        if ended < self.line_punct_thr and not (ended == 0 and self.line_punct_exclude_zero):
            return f"fewer than {self.line_punct_thr:g} of the lines end a sentence"
        if sum(len(line) <= self.short_line_length for line in lines) / len(lines) > self.short_line_thr:
            return f"more than {self.short_line_thr:g} of the lines are short"
        counts, line_ends = Counter(lines), text.count("\n")
        repeated = sum(len(line) * (count - 1) for line, count in counts.items()) if len(counts) < len(lines) else 0
        if repeated / (len(text) - line_ends) > self.char_duplicates_ratio:
            return f"more than {self.char_duplicates_ratio:g} of the characters are in repeated lines"
        # There is a word at least between two white spaces: counting those is enough for most.
        if line_ends / len(text.split()) > self.new_line_ratio and line_ends / len(words(text)) > self.new_line_ratio:
            return f"more than {self.new_line_ratio:g} line ends for each word"
        return document
