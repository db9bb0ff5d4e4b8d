"""results.json: the results, and the definition of each number."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from drover.model.config import ModelConfig
from drover.pipeline.config.tree import Config
from drover.pipeline.core.console import counted, first
from drover.pipeline.core.errors import installed_version
from drover.pipeline.evaluation.items import ANSWER_BITS, TaskResult
from drover.pipeline.evaluation.scores import Measurement, Score, decimals

FORMAT = 1
DIGITS = 6
"""Decimals kept. Further ones depend on a machine's order of summation."""
AFTER = " after training text"
MEANING = {
    "unigram": "each byte coded by its frequency in the training text, no context",
    f"gzip -9{AFTER}": "DEFLATE on the concatenated validation documents after the last 32 KB of training text, its "
                       "window: the bits that the documents add",
    f"xz -9{AFTER}": "LZMA on the concatenated validation documents, one source after another, after training text of "
                     "up to 64 MB, its window: the bits that the documents add",
    "gzip -9": "DEFLATE on the concatenated validation documents, 32 KB window, no training text",
    "xz -9": "LZMA on the concatenated validation documents, sees all of them, no training text",
}
ALONE = ("gzip -9", "xz -9")
"""The baselines that have seen no training text, which the model has."""
DOCUMENTS = "by_document"
"""Of what is measured of validation text, the part that documents.jsonl has, not results.json."""
OVERALL = ""
"""All sources together; no source has an empty name."""
DEFINITIONS = {
    "bits_per_byte": "sum of nats over all target tokens / (ln 2 x UTF-8 bytes of the original text); targets are "
                     "all tokens of a document and its EOS, BOS is context only; no attention across documents; a "
                     "document longer than the window is cut, and predicted without the text before the cut",
    "perplexity": "exp(sum of nats / targets), per token: not comparable between vocabularies",
    "entropy": "bits per byte of the text's own byte frequencies, the lower bound without context",
    **MEANING,
    "stderr": "from the spread of the items: in about 95 of 100 cases the score over all such items lies within two "
              "standard errors; of bits per byte that of a sum of bits over a sum of bytes, of other metrics "
              "lm-evaluation-harness's",
    "chance": "what guessing blindly scores: mean over the items of (right choices / choices)",
    "acc": "share of items whose right choice has the highest log-probability",
    "acc_norm": "the same, with log-probability divided by the choice's length in characters",
    "contamination": "dirty items are those of which more than half of the n-grams of 13 words (of a shorter item, all "
                     "its words in a row) occur in a training document; clean items are the others; an item of fewer "
                     "than 5 words is too short to classify; a character of Chinese or Japanese counts as a word, "
                     "three of Thai, Lao, Khmer or Burmese as one",
    "suites": "mean over the members; centred: of (score - chance) / (1 - chance), with the suite's chance levels; "
              "standard error: of this mean, for independent scores",
    "answer_bits_per_byte": "the model's bits per UTF-8 byte of the right choices: smoother than accuracy",
}


def validation_results(measured: Mapping[str, Any], baselines: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """The section `validation` of results.json. measured: of `measure_validation`; baselines: of `compare`, or {}: then
    their values are None."""
    sources = measured["sources"]
    total = {key: sum(counts[key] for counts in sources.values()) for key in next(iter(sources.values()))}
    of_total = baselines.get(OVERALL if len(sources) > 1 else next(iter(sources)), {})
    return {"sources": {name: _validation_entry(counts, baselines.get(name, {})) for name, counts in sources.items()},
            "overall": _validation_entry(total, of_total),
            **{name: part for name, part in measured.items() if name not in ("sources", DOCUMENTS)}}


def _validation_entry(counts: Mapping[str, Any], baselines: Mapping[str, float]) -> Any:
    """One source, or all of them."""
    loss = Measurement(counts["nats"], counts["targets"], counts["bytes"])
    return rounded({
        **counts, "bits_per_byte": loss.bits_per_byte, "loss": loss.loss, "perplexity": loss.perplexity,
        **{name: baselines.get(name) for name in ("compressed_bytes", "training_bytes", "of_training_bytes",
                                                  "entropy")},
        "baselines": {name: baselines.get(name) for name in MEANING}})


def rounded(value: Any) -> Any:
    """Numbers rounded to DIGITS decimals, also inside mappings; None for values that JSON lacks."""
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    if not isinstance(value, float):
        return value
    return round(value, DIGITS) if math.isfinite(value) else None


def as_json(config: Config, model: ModelConfig, validation: Mapping[str, Any], tasks: Mapping[str, TaskResult],
            continuations: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Everything, ready for results.json."""
    settings = config.evaluate
    return {
        "format": FORMAT,
        "model": {"parameters": model.parameter_count, "non_embedding_parameters": model.non_embedding_parameter_count,
                  "vocab_size": model.vocab_size, "context_length": model.context_length, "dtype": settings.dtype},
        "validation": validation,
        "tasks": task_results(tasks),
        "continuations": continuations,
        "sampling": {"temperature": settings.temperature, "top_p": settings.top_p, "seed": 0,
                     "max_tokens": settings.prompt_tokens},
        "definitions": DEFINITIONS,
        "versions": library_versions(),
    }


def task_results(tasks: Mapping[str, TaskResult]) -> dict[str, Any]:
    """The section `tasks` of results.json."""
    return {name: rounded({key: value for key, value in task.items() if key != "per_item"})
            for name, task in tasks.items()}


def library_versions() -> dict[str, str]:
    """Versions of the libraries that measure, of those that are installed."""
    versions = {package: installed_version(package) for package in ("torch", "lm_eval", "datasets")}
    return {package: version for package, version in versions.items() if version is not None}


def figures(results: Mapping[str, Any]) -> dict[str, dict[str, float | None]]:
    """The results that loggers draw: bits per byte of all validation text, and by source if there are several; the
    metrics of the tasks, and the bits per byte of their right answers."""
    sources = results["validation"]["sources"]
    entries = {"": results["validation"]["overall"], **(sources if len(sources) > 1 else {})}
    return {"validation_text_bpb": {name: entry["bits_per_byte"] for name, entry in entries.items()},
            "task_scores": {f"{name}/{metric}": entry["value"] for name, task in results["tasks"].items()
                            for metric, entry in task["metrics"].items()}
            | {f"{name}/{ANSWER_BITS}": task[ANSWER_BITS] for name, task in results["tasks"].items()}
            | {f"{name}/score": suite["value"] for name, suite in results.get("suites", {}).items()}}


def summary(results: Mapping[str, Any]) -> Iterator[str]:
    """The results in a few lines."""
    total = results["validation"]["overall"]
    scores = {name: f"{name.removesuffix(AFTER)} {value:.3f}" for name, value in total["baselines"].items()}
    seen = ", ".join(score for name, score in scores.items() if name not in ALONE)
    yield (f"{total['bits_per_byte']:.4f} bits per byte on {total['documents']:,} of "
           f"{counted(total['of_documents'], 'validation document')} "
           f"({total['tokens']:,} of {total['of_tokens']:,} tokens, {total['bytes']:,} bytes); "
           f"given training text: {seen}; without: {', '.join(map(scores.__getitem__, ALONE))}")
    for source in results["validation"]["without_validation_text"]:
        yield f"the source {source} has no validation document and was not measured"
    for name, task in results["tasks"].items():
        metrics = _metrics_text(task["metrics"])
        chance = "" if task["chance"] is None else f" (chance {task['chance']:.3f})"
        yield f"{name}: {metrics}{chance}{answer_text(task)} on {task['items']} items"
        if found := task.get("contamination"):
            clean = found["clean"]
            yield (f"{name}: of {counted(task['items'], 'item')}, in the training text: {found['dirty']['items']:,}, "
                   f"too short to judge: {found['too_short']:,}, not in it: {clean['items']:,} "
                   f"({_metrics_text(clean['metrics']) or 'no score'})")
    for name, group in results.get("groups", {}).items():
        chance = "" if group["chance"] is None else f" (chance {group['chance']:.3f})"
        yield f"{name}: {_metrics_text(group['metrics'])}{chance} on {counted(len(group['tasks']), 'task')}"
    for name, suite in results.get("suites", {}).items():
        yield f"{name}: {suite_text(suite)}"
    yield from doubts(results["tasks"])


def answer_text(result: Mapping[str, Any]) -> str:
    """The bits of right answers of a task, as a part of a line; "" if it has none."""
    bits = result["answer_bits_per_byte"]
    score: Score = {"value": bits, "stderr": result.get("answer_bits_stderr")}
    return "" if bits is None else f", answers {metric_text(score)} bits per byte"


def suite_text(suite: Mapping[str, Any]) -> str:
    """A suite's score in a line."""
    chance = "" if suite["chance"] is None else f", chance {suite['chance']:.3f}"
    lacking = f"; not measured: {', '.join(suite['lacking'])}" if suite["lacking"] else ""
    return (f"{metric_text({'value': suite['value'], 'stderr': suite['stderr']})} (mean of {len(suite['members'])} of "
            f"{suite['of']} tasks{', chance subtracted' * suite['centred']}{chance}{lacking}){answer_text(suite)}")


def score_texts(tasks: Mapping[str, Any]) -> list[str]:
    """Each task with its metrics, and the bits of its right answers."""
    return [f"{name} {_metrics_text(task['metrics'])}{answer_text(task)}" for name, task in tasks.items()]


def _metrics_text(metrics: Mapping[str, Score]) -> str:
    return ", ".join(f"{metric} {metric_text(entry)}" for metric, entry in metrics.items())


NAMED = 8
"""Most items that a warning names."""


def doubts(tasks: Mapping[str, TaskResult]) -> Iterator[str]:
    """Warnings about task scores."""
    for name, task in tasks.items():
        if numbers := task["items_without_right_choice"]:
            named = first([*map(str, numbers)], NAMED)
            yield (f"{name}: in {counted(len(numbers), 'item')} of the data (counted from 1: {named}) the target is "
                   f"neither the number of a choice, from 0, nor the text of one; lm-evaluation-harness counts that as "
                   f"wrong")
        for metric, reason in task["without_value"].items():
            yield f"{name}: {metric} has no value: {reason.rstrip('.')}"
        if count := task["contexts_truncated"]:
            yield f"{name}: {count:,} contexts exceeded the context length and lost their beginning"
        if (count := task.get("contamination", {}).get("too_short", 0)) > task["items"] / 2:
            yield f"{name}: {count:,} of {task['items']:,} items are too short to be searched for in the training text"


def metric_text(entry: Score) -> str:
    """0.425 ± 0.079, or only the value."""
    value = "n/a" if entry["value"] is None else decimals(entry["value"], ".3f")
    return value if entry["stderr"] is None else f"{value} ± {decimals(entry['stderr'], '.3f')}"
