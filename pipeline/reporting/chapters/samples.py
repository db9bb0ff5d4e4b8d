"""Texts of the finished model, and of the model during training."""

from __future__ import annotations

from collections.abc import Iterator

from drover.pipeline.reporting.document import Block, Passage, filled, spread
from drover.pipeline.reporting.facts import Facts

MOST_SAMPLES = 4
"""Steps of training whose texts are shown."""


def samples(facts: Facts) -> Iterator[Block]:
    """The chapter: every continuation by the finished model, then the first prompt's at a few steps."""
    if sampling := facts.results.get("sampling"):
        yield filled("Each text continues the prompt in bold, sampled at temperature {temperature}, top-p {top_p}. "
                     "Nothing was selected.", sampling)
    for number, entry in enumerate(facts.results.get("continuations", []), start=1):
        ended = "ended its document" if entry.get("ended") else filled("cut after {tokens} tokens", entry)
        yield Passage(f"Finished model, prompt {number}: {ended}", entry["prompt"], entry["text"])
    # A step that was repeated has several; the last one counts.
    by_step = {sample["step"]: sample for sample in facts.samples if sample["prompt"] == facts.samples[0]["prompt"]}
    for step in spread(sorted(by_step), MOST_SAMPLES):
        yield Passage(f"Sample during training, step {step:,}", by_step[step]["prompt"], by_step[step]["text"])
