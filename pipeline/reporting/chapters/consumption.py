"""Tokens of each source in each phase: planned, and trained on."""

from __future__ import annotations

from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import Record
from drover.pipeline.data.filters.chain import total
from drover.pipeline.data.sampling.consumption import Consumption, planned, train_tokens
from drover.pipeline.reporting.document import ALL, Table
from drover.pipeline.reporting.facts import Facts

COLUMNS = {
    "phase": "{phase}", "source": "{source}", "steps": "{steps:,}", "planned": "{planned:,}",
    "trained on": "{tokens:,}", "rolled back": "{left_out:,}", "epochs planned": "{planned / there:.3f}",
    "epochs trained on": "{tokens / there:.3f}"}
TAKEN = ("planned", "tokens", "left_out")


def consumption(facts: Facts) -> Table:
    """A row for each source of each phase; empty if training had neither phases nor a mixture."""
    train, encoded, rows = facts.config.train, facts.counts("encode"), list[Record]()
    available = train_tokens(facts.config, encoded) if "splits" in encoded else {}
    plan = _planned(facts, available) if train.phases or train.mixture is not None else None
    if plan is None or not available:
        return Table("", {}, rows)
    trained = [{**took, "planned": wanted} for took, wanted in
               zip(facts.counts("train")["phases"], plan.phases, strict=True)]
    whole = {"steps": None, **total({key: phase[key] for key in TAKEN} for phase in trained)}
    for phase, took in [*enumerate(trained, 1), (ALL, whole)]:
        rows += [{"phase": f"{phase}", "source": source, "steps": took["steps"], "there": there,
                  **{key: took[key].get(source, 0) for key in TAKEN}}
                 for source, there in available.items()
                 if phase == ALL or took["planned"].get(source) or took["tokens"].get(source)]
        if plan.padding and phase != ALL:
            rows.append({"phase": f"{phase}", "source": "all, without padding", "steps": took["steps"],
                         "planned": sum(took["planned"].values()), "tokens": took.get("learned")})
    over = [f"{tokens:,} of {source} after phase {before}" for before, left in enumerate(plan.left)
            for source, tokens in left.items() if tokens]
    note = "An epoch is all training tokens of a source."
    if over and not plan.padding:
        note += f" Left to the next epoch, where the sequence length changes: {', '.join(over)}."
    if plan.padding:
        note += (" With packed documents, a source's tokens are estimated by the mean of its sequences. The tokens of "
                 "all sources without padding were counted.")
    return Table("Tokens by phase and source, as planned and as trained on", COLUMNS, rows, note)


def _planned(facts: Facts, available: dict[str, int]) -> Consumption | None:
    """The planned tokens; None if they are unknown. For packed documents training records them: take its first record
    of the plan that it ended with."""
    if facts.config.train.packing == "concatenate":
        try:
            return planned(facts.config, available)
        except UserError:  # training was accepted under other settings (--accept-drift)
            return None
    if (last := facts.counts("train").get("planned")) is None:
        return None  # without phases: the manifest has epochs
    said = [event["planned"] for event in facts.events if "planned" in event]
    first = next((one for one in said if one["plan_sha256"] == last["plan_sha256"]), last)
    return Consumption(tuple(first["tokens"]), available, padding=tuple(first["padding"]))
