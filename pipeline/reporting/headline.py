"""The top of the report: what came out, in one sentence and a few figures, and what casts doubt on it."""

from __future__ import annotations

from drover.pipeline.console import duration
from drover.pipeline.reporting.document import Notice, Tile, percent, shown, size
from drover.pipeline.reporting.facts import Facts
from drover.pipeline.reporting.plots import compact

NAMES = {"unigram": "a unigram byte model"}


def verdict(facts: Facts) -> str:
    """One sentence."""
    total = facts.results.get("heldout", {}).get("overall")
    trained = facts.manifests["train"].counts
    sources = ", ".join(source.name for source in facts.config.shard.sources)
    start = facts.config.train.init_from
    begun = f"started from the weights in {start} and " if start is not None else ""
    made = (f"A Llama with {_amount(trained.get('parameters'))} parameters, {begun}trained on "
            f"{_amount(trained.get('tokens'))} tokens of {sources}")
    if not total or total.get("bits_per_byte") is None:
        return f"{made}. It was not measured on held-out text."
    ours = total["bits_per_byte"]
    compared = [f"{percent(abs(1 - ours / other), 0)} {'less' if ours <= other else 'more'} than "
                f"{NAMES.get(name, name)}" for name, other in total["baselines"].items() if other]
    return f"{made}, needs {ours:.3f} bits per byte of held-out text: {_and(compared)}."


def tiles(facts: Facts) -> list[Tile]:
    """The headline figures."""
    train, results = facts.manifests["train"], facts.results
    counts, total = train.counts, results.get("heldout", {}).get("overall", {})
    found = []
    if total.get("bits_per_byte") is not None:
        found.append(Tile("held-out bits per byte", f"{total['bits_per_byte']:.3f}",
                          f"{size(total['bytes'])}, {total['documents']:,} documents"))
    if total.get("perplexity") is not None:
        found.append(Tile("held-out perplexity", f"{total['perplexity']:.2f}", "per token"))
    if counts.get("parameters"):
        inner = results.get("model", {}).get("non_embedding_parameters")
        found.append(Tile("parameters", compact(counts["parameters"]),
                          f"{compact(inner)} without embeddings" if inner else ""))
    if counts.get("tokens"):
        found.append(Tile("training tokens", compact(counts["tokens"]), f"{shown(counts.get('steps'))} steps"))
    speeds = sorted(record["tokens_per_s"] for record in facts.metrics if record.get("tokens_per_s"))
    if speeds:
        found.append(Tile("tokens per second", compact(speeds[len(speeds) // 2]), "median step, all ranks"))
    if facts.goodput is not None:
        found.append(Tile("goodput", percent(facts.goodput.share, 0), "of the time since training first started"))
    own = [manifest for name, manifest in facts.manifests.items() if name not in facts.reused]
    found.append(Tile("wall time", duration(sum(manifest.wall_s for manifest in own)),
                      f"training {duration(train.wall_s)}"))
    return found


def notices(facts: Facts) -> list[Notice]:
    """What must be known before the figures are believed."""
    found = []
    if facts.drift:
        items = [f"{entry['stage']}: {difference}" for entry in facts.drift for difference in entry["differences"]]
        found.append(Notice("warning", "Stages of this run were not made of what the configuration says now "
                                       "(--accept-drift let it pass):", items))
    if facts.changed_code:
        found.append(Notice("warning", "The code changed after these stages ran; --force rebuilds them:",
                            [f"{stage}: {', '.join(files)}" for stage, files in facts.changed_code.items()]))
    changed = [name for name, manifest in facts.manifests.items() if manifest.git.get("changed")]
    if changed:
        found.append(Notice("note", f"Made with uncommitted changes in the code: {', '.join(changed)}."))
    commits = {manifest.git["commit"] for manifest in facts.manifests.values() if manifest.git.get("commit")}
    if len(commits) > 1:
        found.append(Notice("note", f"The stages were made by {len(commits)} commits: see Provenance."))
    restarts = facts.manifests["train"].counts.get("restarts")
    if restarts:
        found.append(Notice("note", f"Training was interrupted and continued {restarts} "
                                    f"time{'s' if restarts > 1 else ''}; steps done twice are shown once."))
    if marks := facts.tokenizer.get("marks_as_spaces"):
        found.append(Notice("note", f"The tokenizer reads U+2581 (\u2581) back as a space; it occurs in "
                                    f"{_times(marks, 'document', 'documents', 'of the text')}."))
    found += _troubles(facts)
    unmeasured = facts.results.get("heldout", {}).get("without_heldout_text")
    if unmeasured:
        found.append(Notice("note", f"No held-out documents, and so no figures, for {', '.join(unmeasured)}."))
    return found


def _troubles(facts: Facts) -> list[Notice]:
    """What training had to be kept from."""
    counts, found = facts.manifests["train"].counts, []
    told = [_times(counts.get("skipped"), "update was", "updates were", "skipped"),
            _times(counts.get("rollbacks"), "rollback", "rollbacks", "left samples out for good"),
            _times(len(facts.events_of("spike")), "spike was", "spikes were", "trained on all the same")]
    if any(told):
        found.append(Notice("note", f"Steps with a loss or gradient norm that was NaN or far above those before: "
                                    f"{_and([text for text in told if text])}. The curves show the steps that were "
                                    f"applied; the events are under Training."))
    if failed := _times(len(facts.events_of("checkpoint_failed")), "attempt", "attempts",
                        "to save a checkpoint failed, and another succeeded"):
        found.append(Notice("note", f"{failed}."))
    return found


def _times(count: int | None, one: str, many: str, what: str) -> str:
    return f"{count:,} {one if count == 1 else many} {what}" if count else ""


def _amount(value: float | None) -> str:
    return "an unknown number of" if value is None else compact(value)


def _and(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
