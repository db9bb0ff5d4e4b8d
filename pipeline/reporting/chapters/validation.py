"""Validation: bits per byte of each source and of all, next to those of compressors."""

from __future__ import annotations

from collections.abc import Iterator

from drover.pipeline.reporting.document import ALL, Bars, Block, Table, filled, flat
from drover.pipeline.reporting.facts import Facts


def validation(facts: Facts) -> Iterator[Block]:
    """The chapter; empty without validation text."""
    if not (found := facts.validation):
        return
    total, meanings = found["overall"], facts.results.get("definitions", {})
    names, ours = list(total["baselines"]), facts.config.name
    yield filled("{overall[documents]:,} documents that training did not see, {overall[bytes]:,} bytes, "
                 "{overall[targets]:,} tokens, in windows of {window:,} tokens. Bits per byte do not depend on the "
                 "tokenizer; lower is better.", found)
    bars = {**total["baselines"], ours: total["bits_per_byte"]}
    yield Bars("Bits per byte of validation text", "bits per byte", {name: bars[name] for name in sorted(
        bars, key=lambda name: bars[name])}, ours)
    given = [filled("Training text that xz was given: {training_bytes:,} of {of_training_bytes:,} bytes.", total)] \
        if "training_bytes" in total else []
    entries = {**found["sources"], **({ALL: total} if len(found["sources"]) > 1 else {})}
    yield Table("Bits per byte by source", {
        "source": "{name}", "model": "{bits_per_byte:.4f}",
        **{name: f"{{baselines[{name}]:.4f}}" for name in names}, "byte entropy": "{entropy:.4f}",
        "perplexity": "{perplexity:.3f}", "documents": "{documents:,}", "bytes": "{bytes:,}", "tokens": "{targets:,}"},
        flat(entries, "name"),
        " ".join([*(f"{name}: {meanings[name]}." for name in names if name in meanings), *given]))
