"""The top of the report: the result in a sentence and a few figures, with warnings and notes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import starmap
from statistics import median

from drover.pipeline.config.loading import dump_config
from drover.pipeline.core.console import counted
from drover.pipeline.data.sampling.consumption import AS_IF, many_epochs, repetition
from drover.pipeline.evaluation.results import ALONE
from drover.pipeline.records.metrics import reordered
from drover.pipeline.reporting.document import NONE, Block, Notice, Table, Text, Tile, filled
from drover.pipeline.reporting.facts import Facts, shareable

FEW_DOCUMENTS = 10
"""With fewer validation documents of a source, its figures depend on what these happen to be."""
NAMES = {"unigram": "a unigram byte model"}
TILES = (
    ("validation bits per byte", "{total[bits_per_byte]:.3f}", "{total[bytes]:B}, {total[documents]:documents}"),
    ("validation perplexity", "{total[perplexity]:.2f}", "per token"),
    ("parameters", "{parameters:k}", "{model[non_embedding_parameters]:k} without embeddings"),
    ("training tokens", "{tokens:k}", "{steps:steps}, {most_epochs[0]:n} epochs of {most_epochs[1]}"),
    ("tokens per second", "{speed:k}", "median step, all ranks"),
    ("goodput", "{goodput:.1%}", "of the time since training first started"),
    ("run time", "{run_s:s}", "training {train_s:s}"))
WARNINGS = {
    "reordered": AS_IF,
    "accepted": "Training continued although its settings or inputs had changed (--accept-changes): {accepted}.",
    "changed_code": "The code has changed since these stages ran; --force rebuilds them: {changed_code}."}
NOTES = {
    "changed": "Made with uncommitted changes in the code: {changed}.",
    "marks_as_spaces": "The tokenizer decodes U+2581 (\u2581) as a space. Documents with that character: "
                       "{marks_as_spaces:,}.",
    "incomplete": "Input files of which something could not be read: {incomplete:,}. See Data.",
    "restarts": "Restarts of training: {restarts:,}. Repeated steps are shown once.",
    "anomalies": "Steps with a loss or gradient norm that was NaN or far above those before: {skipped:,} skipped, "
                 "{spikes:,} trained on; {rollbacks:,} rollbacks removed samples. The curves show the applied updates; "
                 "the events are under Training.",
    "few_documents": "The validation text is only {few_documents}, so its figures may not hold for other text. For "
                     "more, raise shard.validation_share.",
    "without_validation_text": "No validation documents, and so no figures, for {without_validation_text}."}
"""The text for each fact, if it exists."""


def result(facts: Facts) -> str:
    """One sentence."""
    total, start = facts.validation.get("overall", {}), facts.config.train.init_from
    made = filled("A Llama with {parameters:k} parameters, {begun}trained on {tokens:k} tokens of {names}", {
        **facts.counts("train"), "names": facts.config.source_names,
        "begun": f"started from the weights in {shareable(str(start))} and " if start is not None else ""})
    if (ours := total.get("bits_per_byte")) is None:
        return f"{made}. It was not evaluated on validation text."
    compared = ", ".join(f"{abs(1 - ours / other):.0%} {'less' if ours <= other else 'more'} than "
                         f"{NAMES.get(name, name)}" for name, other in total["baselines"].items()
                         if other and name not in ALONE)
    return f"{made}, needs {ours:.3f} bits per byte of validation text{compared and ': '}{compared}."


def tiles(facts: Facts) -> Iterator[Tile]:
    """The headline figures."""
    speeds = facts.series("tokens_per_s").values()
    counts = facts.counts("train")
    epochs = [(epochs, source) for source, epochs in counts.get("epochs", {}).items()]
    known = {**counts, "most_epochs": max(epochs, default=None),
             "total": facts.validation.get("overall"), "model": facts.results.get("model"),
             "speed": median(speeds) if speeds else None, "goodput": facts.goodput and facts.goodput.share,
             "run_s": sum(own.run_s for name, own in facts.manifests.items() if name not in facts.reused),
             "train_s": facts.manifests["train"].run_s}
    for label, figure, note in TILES:
        if (text := filled(figure, known)) != NONE:
            yield Tile(label, text, filled(note, known))


def notices(facts: Facts) -> Iterator[Notice]:
    """Warnings and notes about the figures."""
    manifests, counts, files = facts.manifests.values(), facts.counts("train"), facts.counts("shard").get("files", {})
    spikes = sum(event["event"] == "spike" for event in facts.events)
    known = {
        **facts.validation, **counts, "reordered": reordered(facts.events), "changed_code": facts.changed_code,
        "spikes": spikes,
        "few_documents": [f"{counted(own['documents'], 'document')} of {source}" for source, own in
                          facts.validation.get("sources", {}).items() if own["documents"] < FEW_DOCUMENTS],
        "accepted": list(dict.fromkeys(shareable(change) for manifest in manifests for change in manifest.accepted)),
        "changed": [manifest.stage for manifest in manifests if manifest.git.get("changed")],
        "marks_as_spaces": facts.tokenizer.get("marks_as_spaces"),
        "incomplete": files.get("partly", 0) + files.get("unread", 0),
        "anomalies": spikes or counts.get("skipped") or counts.get("rollbacks")}
    yield from (Notice("warning", text) for text in starmap(repetition, many_epochs(
        facts.config.train, counts.get("epochs", {})).items()))
    for kind, texts in (("warning", WARNINGS), ("note", NOTES)):
        yield from (Notice(kind, filled(text, known)) for name, text in texts.items() if known.get(name))


def provenance(facts: Facts) -> Iterator[Block]:
    """The stages: how long they ran, on which machines, and from which inputs, code and settings."""
    rows = []
    for name, manifest in facts.manifests.items():
        commit = str(manifest.git.get("commit") or NONE)[:10] + " + changes" * bool(manifest.git.get("changed"))
        rows.append({**vars(manifest), "run_s": manifest.run_s, "time": manifest.finished.replace("T", " ")[:19],
                     "size": sum(record["bytes"] for record in manifest.outputs), "commit": commit,
                     "reused": facts.reused.get(name)})
    yield Table("Stages", {
        "stage": "{stage}", "run time": "{run_s:s}", "ranks": "{execution[world_size]:n}",
        "processes": "{execution[processes]:n}", "cores": "{execution[cores]:n}", "host": "{execution[host]}",
        "accelerator": "{counts[device_name]}", "finished (UTC)": "{time}", "output": "{size:B}", "commit": "{commit}",
        "reused from the run": "{reused}"}, rows,
        "Run time: of the start that finished the stage; of all starts of training. Each stage's manifest.json has the "
        "hashes of its inputs and outputs.")
    yield filled("The newest checkpoint is train/{checkpoint}, the Hugging Face model convert/hf. "
                 "train/metrics.jsonl has every step, evaluate/results.json the evaluation and what its numbers mean.",
                 facts.counts("train"))
    yield Text("Configuration, with all defaults and without folders", shareable(dump_config(facts.config)),
               folded=True)
