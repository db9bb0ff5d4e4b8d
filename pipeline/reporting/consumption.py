"""What training took of each source in each phase, beside what was planned."""

from __future__ import annotations

from drover.pipeline.config.phases import PhasePlan
from drover.pipeline.data.sampling.consumption import Consumption, planned, train_tokens
from drover.pipeline.errors import UserError
from drover.pipeline.reporting.document import Table, shown
from drover.pipeline.reporting.facts import Facts


def consumption_tables(facts: Facts) -> list[Table]:
    """A row for each source of each phase; none where training had neither phases nor a mixture."""
    train, encoded = facts.config.train, facts.manifests["encode"].counts
    if not (train.phases or train.mixture is not None) or "splits" not in encoded:
        return []
    available = train_tokens(facts.config, encoded)
    plan = _planned(facts, available)
    if plan is None:
        return []
    consumed, left_out = _consumed(facts, available)
    rows: list[list[str]] = []
    for number, phase in enumerate(PhasePlan.of(train).phases):
        for source in available:
            wanted, took = plan.phases[number].get(source, 0), consumed.phases[number].get(source, 0)
            if wanted or took:
                rows.append([f"{number + 1}", source, shown(phase.steps), shown(wanted), shown(took),
                             shown(left_out[number].get(source, 0)), _epochs(wanted, available[source]),
                             _epochs(took, available[source])])
        if plan.padding:
            rows.append([f"{number + 1}", "all, without padding", shown(phase.steps), *_without_padding(
                facts, plan, number), "", "", ""])
    for source in available:
        rows.append(["all", source, "", shown(plan.tokens(source)), shown(consumed.tokens(source)),
                     shown(sum(phase.get(source, 0) for phase in left_out)), f"{plan.epochs(source):.3f}",
                     f"{consumed.epochs(source):.3f}"])
    over = [f"{shown(tokens)} of {source} after phase {number + 1}" for number, phase in enumerate(plan.passed_over)
            for source, tokens in phase.items() if tokens]
    note = (f" Left to the next epoch, where the length of sequences changes: {', '.join(over)}." if over else "")
    note += (" Of packed documents a source's tokens are counted by the mean of its sequences; what all gave without "
             "padding was counted." if plan.padding else "")
    return [Table("Tokens by phase and source, as planned and as trained on",
                  ["phase", "source", "steps", "planned", "trained on", "left out", "epochs planned",
                   "epochs trained on"], rows, labels=2,
                  note=f"An epoch is all training tokens of a source. Left out: by rollbacks.{note}")]


def _planned(facts: Facts, available: dict[str, int]) -> Consumption | None:
    """What was planned; None where that cannot be told. Of packed documents training says it: as it did when it first
    went by the plan that it ended with."""
    if facts.config.train.packing == "concatenate":
        try:
            return planned(facts.config, available)
        except UserError:  # what was trained was accepted under other settings (--accept-drift)
            return None
    if (last := facts.manifests["train"].counts.get("planned")) is None:
        return None  # without phases: the manifest has epochs
    said = [event["planned"] for event in facts.events if "planned" in event]
    first = next((one for one in said if one["plan_sha256"] == last["plan_sha256"]), last)
    return Consumption(tuple(first["tokens"]), available, padding=tuple(first["padding"]))


def _without_padding(facts: Facts, plan: Consumption, number: int) -> tuple[str, str]:
    """The tokens of all sources in a phase, as planned and as they were counted."""
    learned = facts.manifests["train"].counts["phases"][number].get("learned")
    return shown(sum(plan.phases[number].values())), "–" if learned is None else shown(learned)


def _epochs(tokens: int, available: int) -> str:
    return f"{tokens / available:.3f}" if available else "–"


def _consumed(facts: Facts, available: dict[str, int]) -> tuple[Consumption, list[dict[str, int]]]:
    """What training says it took, and what was left out of it, phase by phase."""
    train, counts = facts.config.train, facts.manifests["train"].counts
    if counted := counts.get("phases"):
        return (Consumption(tuple(phase["tokens"] for phase in counted), available),
                [phase["left_out"] for phase in counted])
    length = train.sequence_length  # one phase: training counts epochs of whole sequences
    tokens = {source: round(share * (max(0, available[source] - 1) // length)) * length
              for source, share in counts.get("epochs", {}).items() if source in available}
    return Consumption((tokens,), available), [counts.get("left_out", {})]
