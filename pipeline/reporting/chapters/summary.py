"""The top of the report: the result in a sentence and a few figures, with warnings and notes."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from drover.pipeline.core.console import readable
from drover.pipeline.data.sampling.consumption import MANY
from drover.pipeline.evaluation.baselines import AFTER, ALONE, DEFLATE_WINDOW
from drover.pipeline.reporting.document import NONE, Notice, Tile, filled
from drover.pipeline.reporting.facts import Facts, shareable

NAMES = {"unigram": "a unigram byte model"}
TILES = (
    ("validation bits per byte", "{total[bits_per_byte]:.3f}", "{total[bytes]:B}, {total[documents]:,} documents"),
    ("validation perplexity", "{total[perplexity]:.2f}", "per token"),
    ("parameters", "{parameters:k}", "{model[non_embedding_parameters]:k} without embeddings"),
    ("training tokens", "{tokens:k}", "{steps:,} steps"),
    ("tokens per second", "{speed:k}", "median step, all ranks"),
    ("goodput", "{goodput:.1%}", "of the time since training first started"),
    ("run time", "{run_s:s}", "training {train_s:s}"))
NOTES = {
    "changed": "Made with uncommitted changes in the code: {changed}.",
    "commits": "The stages were made by {commits} commits: see Provenance.",
    "marks_as_spaces": "The tokenizer decodes U+2581 (\u2581) as a space. Documents with that character: "
                       "{marks_as_spaces:,}.",
    "restarts": "Restarts of training: {restarts:,}. Repeated steps are shown once.",
    "anomalies": "Steps with a loss or gradient norm that was NaN or far above those before: {skipped:,} skipped, "
                 "{spikes:,} trained on; {rollbacks:,} rollbacks removed samples. The curves show the applied updates; "
                 "the events are under Training.",
    "failed": "Attempts to save a checkpoint that failed before another succeeded: {failed:,}.",
    "unmeasured": "No validation documents, and so no figures, for {unmeasured}."}
"""The note for each fact, if it exists."""


def verdict(facts: Facts) -> str:
    """One sentence."""
    total, start = facts.validation.get("overall", {}), facts.config.train.init_from
    made = filled("A Llama with {parameters:k} parameters, {begun}trained on {tokens:k} tokens of {names}", {
        **facts.counts("train"), "names": facts.config.shard.source_names,
        "begun": f"started from the weights in {shareable(str(start))} and " if start is not None else ""})
    if (ours := total.get("bits_per_byte")) is None:
        return f"{made}. It was not evaluated on validation text."
    fair = {name.removesuffix(AFTER): other for name, other in total["baselines"].items()
            if other and name not in ALONE}
    compared = ", ".join(f"{abs(1 - ours / other):.0%} {'less' if ours <= other else 'more'} than "
                         f"{NAMES.get(name, name)}" for name, other in fair.items())
    for_gzip = readable(size) if (size := total.get("training_bytes", 0)) < DEFLATE_WINDOW else "32 KB"
    given = filled(f" (of {{of_training_bytes:B}} of training text gzip was given {for_gzip}, xz {{training_bytes:B}})",
                   total)
    best = min(fair, key=fair.__getitem__, default=None)
    wins = (f" {f'Even {NAMES[best]}' if best in NAMES else best} compresses it better than the model."
            if best is not None and fair[best] < ours else "")
    return (f"{made}, needs {ours:.3f} bits per byte of validation text{f': {compared}' if fair else ''}"
            f"{given if any(name.endswith(AFTER) for name in total['baselines']) else ''}.{wins}")


def tiles(facts: Facts) -> Iterator[Tile]:
    """The headline figures."""
    speeds = [record["tokens_per_s"] for record in facts.metrics if record.get("tokens_per_s")]
    known = {**facts.counts("train"), "total": facts.validation.get("overall"), "model": facts.results.get("model"),
             "speed": median(speeds) if speeds else None, "goodput": facts.goodput and facts.goodput.share,
             "run_s": sum(facts.wall_s(name) for name in facts.manifests if name not in facts.reused),
             "train_s": facts.wall_s("train")}
    for label, value, note in TILES:
        if (figure := filled(value, known)) != NONE:
            yield Tile(label, figure, filled(note, known))


def notices(facts: Facts) -> Iterator[Notice]:
    """Warnings and notes about the figures."""
    manifests = facts.manifests.values()
    if drift := [shareable(f"{entry['stage']}: {difference}") for manifest in manifests for entry in manifest.drift
                 for difference in entry["differences"]]:
        yield Notice("warning", "Stages of this run were made with other settings or inputs than the configuration "
                                "names now (--accept-drift allowed it):", list(dict.fromkeys(drift)))
    if facts.changed_code:
        yield Notice("warning", "The code has changed since these stages ran; --force rebuilds them:",
                     [f"{stage}: {', '.join(files)}" for stage, files in facts.changed_code.items()])
    if many := {source: epochs for source, epochs in facts.counts("train").get("epochs", {}).items() if epochs > MANY}:
        yield Notice("warning", f"Text was repeated more than {MANY:g} times, beyond which it helps little:",
                     [f"{source}: {epochs:.1f} epochs" for source, epochs in many.items()])
    commits = {manifest.git["commit"] for manifest in manifests if manifest.git.get("commit")}
    spikes, counts = len(facts.events_of("spike")), facts.counts("train")
    known = {**counts, "marks_as_spaces": facts.tokenizer.get("marks_as_spaces"), "spikes": spikes,
             "changed": [manifest.stage for manifest in manifests if manifest.git.get("changed")],
             "commits": len(commits) if len(commits) > 1 else 0, "failed": len(facts.events_of("checkpoint_failed")),
             "anomalies": spikes or counts.get("skipped") or counts.get("rollbacks"),
             "unmeasured": facts.validation.get("without_validation_text")}
    for name, text in NOTES.items():
        if known.get(name):
            yield Notice("note", filled(text, known))
