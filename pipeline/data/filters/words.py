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
