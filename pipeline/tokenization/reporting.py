"""The tokenizer's report: what its tokens are like on held-out text of each source."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from pipeline.tokenization.base import Tokenizer
from pipeline.tokenization.checking import Tally

LONGEST = 12
COLUMNS = (("bytes_per_token", "bytes/token"), ("characters_per_token", "chars/token"),
           ("tokens_per_word", "tokens/word"), ("fallback_share", "byte fallback"), ("unknown_share", "unknown"),
           ("round_trip_failures", "not read back"))


def described(tokenizer: Tokenizer, tallies: dict[str, Tally], sample: Tally, seen: set[int],
              marks: int = 0, heldout: int = 0) -> dict[str, Any]:
    """The report as JSON; the same text and vocabulary give the same report.

    Args:
        tallies: sums of the held-out documents by source.
        sample: sums of the training documents that were checked too.
        seen: ids that occurred in any of them.
        marks: documents of all text whose U+2581 comes back as a space.
        heldout: documents that are held out; said where not all of them were checked.
    """
    total = Tally()
    for tally in tallies.values():
        total.add(tally)
    pieces = [token for token in range(tokenizer.used) if token not in tokenizer.special_ids
              and token not in tokenizer.byte_fallback_ids and token != tokenizer.unk_id]
    unused = [token for token in pieces if token not in seen]
    longest = sorted(pieces, key=lambda token: (-len(tokenizer.token_bytes(token)), token))[:LONGEST]
    some = {"heldout_documents": heldout} if total.documents < heldout else {}
    return {"kind": tokenizer.kind, "size": tokenizer.size, "used": tokenizer.used, **some,
            "special_ids": len(tokenizer.special_ids),
            "pieces": len(pieces), "unused_pieces": len(unused),
            "unused_examples": _shown(tokenizer, unused[:LONGEST]), "longest_pieces": _shown(tokenizer, longest),
            "marks_as_spaces": marks, "total": _measured(total), "training_sample": _measured(sample),
            "sources": {source: _measured(tally) for source, tally in sorted(tallies.items())}}


def as_markdown(report: dict[str, Any]) -> str:
    """The report as a page for people."""
    rows = [*report["sources"].items()]
    if len(rows) > 1:
        rows.append(("all", report["total"]))
    total = report["total"]
    some = f" of {report['heldout_documents']:,}" if "heldout_documents" in report else ""
    lines = [f"# Tokenizer: {report['kind']}, {report['size']:,} ids", "",
             f"{report['used']:,} ids mean something ({report['special_ids']} special ids, {report['pieces']:,} "
             f"pieces); the rest is padding. Measured on held-out text: {total['documents']:,}{some} documents, "
             f"{total['text_bytes'] / 1e6:.2f} MB.", "",
             "| source | documents | MB | tokens | " + " | ".join(title for _, title in COLUMNS) + " |",
             "|---|" + "---:|" * (3 + len(COLUMNS))]
    for source, numbers in rows:
        cells = [f"{numbers['documents']:,}", f"{numbers['text_bytes'] / 1e6:.2f}", f"{numbers['tokens']:,}",
                 *(_cell(name, numbers[name]) for name, _ in COLUMNS)]
        lines.append(f"| {source} | " + " | ".join(cells) + " |")
    lines += ["", f"The exported `hf/tokenizer.json`, loaded by transformers, gave the same ids and the same text on "
                  f"all of them and on {report['training_sample']['documents']:,} training documents "
                  f"({report['training_sample']['text_bytes'] / 1e6:.2f} MB).",
              f"Documents with a literal U+2581, which comes back as a space: {report['marks_as_spaces']:,} of all, "
              f"{total['literal_marks']:,} held out. Held-out documents with "
              f"NUL: {total['nul_documents']}; encoded in parts for their length: {total['cut_documents']}.", "",
              f"Pieces that occurred in none of them: {report['unused_pieces']:,} "
              f"of {report['pieces']:,}" + (f", such as {_listed(report['unused_examples'])}" if report["unused_pieces"]
                                         else "") + ".", "",
              f"Longest pieces: {_listed(report['longest_pieces'])}.", ""]
    return "\n".join(lines)


def _measured(tally: Tally) -> dict[str, Any]:
    def share(part: int, whole: int) -> float | None:
        return round(part / whole, 6) if whole else None
    return {**asdict(tally), "bytes_per_token": share(tally.text_bytes, tally.tokens),
            "characters_per_token": share(tally.characters, tally.tokens),
            "tokens_per_word": share(tally.tokens, tally.words),
            "fallback_share": share(tally.fallback_tokens, tally.tokens),
            "unknown_share": share(tally.unknown_tokens, tally.tokens)}


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.3%}" if name.endswith("_share") else f"{value:.3f}"


def _shown(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    return [tokenizer.token_bytes(token).decode("utf-8", errors="backslashreplace") for token in tokens]


def _listed(pieces: list[str]) -> str:
    return ", ".join(f"`{piece!r}`".replace("|", "\\|") for piece in pieces)
