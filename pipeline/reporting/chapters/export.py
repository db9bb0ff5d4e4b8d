"""The exported model, and its verification."""

from __future__ import annotations

from collections.abc import Iterator

from drover.pipeline.reporting.document import Block, Table, filled
from drover.pipeline.reporting.facts import Facts

SIDES = {"transformers, on the export": "transformers", "training model": "training",
         "single precision itself": "single_precision"}


def export(facts: Facts) -> Iterator[Block]:
    """The chapter; empty if nothing was compared."""
    counts = facts.counts("convert")
    if "transformers_logit_error" not in counts:
        return
    yield filled(
        "{tensors_compared:,} tensors of the export equal the checkpoint's, bit for bit. On {tokens_compared:,} "
        "validation tokens, the exported model in transformers and the training model were each compared with a "
        "float64 forward pass of the checkpoint ({layers_compared:,} of {layers:,} layers). The largest logit is "
        "{largest_logit:n}, the mean token loss {token_loss:n} nats. The most likely next token was the same for "
        "{argmax_equal:,} tokens; for {undecided:,} rounding can decide it.",
        {**counts, "layers": facts.config.model.layers,
         "undecided": counts["tokens_compared"] - counts["argmax_decided"]})
    yield Table("Largest difference from float64", {
        "float32 arithmetic of": "{title}", "logits": "{logits:n}", "token losses (nats)": "{losses:n}"},
        [{"title": title, "logits": counts[f"{key}_logit_error"], "losses": counts[f"{key}_loss_error"]}
         for title, key in SIDES.items()],
        filled("The limit for either model is {factor:n} times the difference of single precision itself.", counts))
