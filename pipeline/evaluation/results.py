"""results.json and results.md: what was measured, and what each figure means."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any

from drover.model.config import ModelConfig
from drover.pipeline.config.tree import Config
from drover.pipeline.evaluation.baselines import MEANING, OVERALL
from drover.pipeline.evaluation.measurement import Measurement

if TYPE_CHECKING:
    from drover.pipeline.data.chosen_documents import Chosen

FORMAT = 1
DIGITS = 6
"""Decimals kept: below that, the order in which a machine adds shows."""
DEFINITIONS = {
    "bits_per_byte": "sum of nats over all target tokens / (ln 2 x UTF-8 bytes of the original text); targets are "
                     "all tokens of a document and its EOS, BOS is context only; no attention across documents; a "
                     "document longer than the window is cut, and predicted without what is before the cut",
    "perplexity": "exp(sum of nats / targets), per token: not comparable between vocabularies",
    "entropy": "bits per byte of the text's own byte frequencies, the least without context",
    **MEANING,
    "stderr": "standard error of the mean over the task's items (lm-evaluation-harness)",
    "chance": "mean over the items of (right choices / choices)",
    "acc": "share of items whose right choice has the highest log-probability",
    "acc_norm": "the same, with log-probability divided by the choice's length in characters",
    "contamination": "dirty items are those of which more than half of the n-grams of 13 words (of a shorter item, all "
                     "its words in a row) stand in a training document; clean items are the others; one of fewer than "
                     "5 words is too short to say",
    "answer_bits_per_byte": "bits that the right choices need per UTF-8 byte: smoother than accuracy",
}


AMOUNTS = ("documents", "tokens", "of_documents", "of_tokens")
"""Of held-out text: what was measured, and what there is."""


def heldout_counts(found: Measurement, chosen: Chosen) -> dict[str, Any]:
    """What was measured of a source, as it is kept: exact, without baselines."""
    return {"nats": found.nats, "targets": found.targets, "bytes": found.text_bytes, "documents": len(chosen),
            "tokens": int(chosen.lengths.sum()), "of_documents": chosen.of_documents, "of_tokens": chosen.of_tokens}


def heldout_results(found: dict[str, Any]) -> dict[str, Any]:
    """The section `heldout` of results.json. found: `sources`, by name what `heldout_counts` has; `baselines`, what
    `baselines.compare` gives; `without_heldout_text`, sources that have none."""
    sources, compared = found["sources"], found["baselines"]
    everything = {key: sum(counts[key] for counts in sources.values())
                  for key in ("nats", "targets", "bytes", *AMOUNTS)}
    whole = compared[OVERALL] if len(sources) > 1 else next(iter(compared.values()))
    return {"sources": {name: _heldout_entry(counts, compared[name]) for name, counts in sources.items()},
            "overall": _heldout_entry(everything, whole), "without_heldout_text": found["without_heldout_text"]}


def _heldout_entry(counts: dict[str, Any], compared: dict[str, float]) -> dict[str, Any]:
    """One source, or all of them."""
    found = Measurement(counts["nats"], counts["targets"], counts["bytes"])
    return {**counts, "nats": rounded(found.nats), "bits_per_byte": rounded(found.bits_per_byte),
            "loss": rounded(found.loss), "perplexity": rounded(found.perplexity),
            "compressed_bytes": compared["compressed_bytes"],
            "baselines": {name: rounded(compared[name]) for name in MEANING}, "entropy": rounded(compared["entropy"])}


def rounded(value: Any) -> Any:
    """Numbers with DIGITS decimals, in mappings too; None for what JSON cannot hold."""
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    if not isinstance(value, float):
        return value
    return round(value, DIGITS) if math.isfinite(value) else None


def as_json(config: Config, model: ModelConfig, window: int, found: dict[str, Any]) -> dict[str, Any]:
    """Everything, ready for results.json."""
    settings = config.evaluate
    tasks = {name: rounded({key: value for key, value in task.items() if key != "per_item"})
             for name, task in found["tasks"].items()}
    return {
        "format": FORMAT,
        "model": {"parameters": model.parameter_count, "non_embedding_parameters": model.non_embedding_parameter_count,
                  "vocab_size": model.vocab_size, "context_length": model.context_length, "dtype": settings.dtype},
        "heldout": {**heldout_results(found["heldout"]), "window": window}, "tasks": tasks,
        "continuations": found["continuations"],
        "sampling": {"temperature": settings.temperature, "top_p": settings.top_p, "seed": 0,
                     "max_tokens": settings.prompt_tokens},
        "definitions": DEFINITIONS,
        "versions": {package: metadata.version(package) for package in ("torch", "lm_eval", "datasets")},
    }


def say_results(results: dict[str, Any]) -> Iterator[str]:
    """The story of the stage in a few lines."""
    total = results["heldout"]["overall"]
    others = ", ".join(f"{name} {value:.3f}" for name, value in total["baselines"].items())
    yield (f"{total['bits_per_byte']:.4f} bits per byte on {_share(total)} "
           f"({total['bytes']:,} bytes); {others}")
    for name, entry in results["heldout"]["sources"].items():
        if entry["documents"] < entry["of_documents"]:
            yield f"{name}: measured on {_share(entry)}; evaluate.heldout_tokens=null takes all"
        if entry["compressed_bytes"] < entry["bytes"]:
            yield (f"{name}: gzip and xz were given the first {entry['compressed_bytes']:,} of {entry['bytes']:,} "
                   f"bytes (evaluate.compressed_mb)")
    for source in results["heldout"]["without_heldout_text"]:
        yield f"the source {source} has no held-out document and was not measured"
    for name, task in results["tasks"].items():
        shown = ", ".join(f"{metric} {metric_text(entry)}" for metric, entry in task["metrics"].items())
        chance = "" if task["chance"] is None else f" (chance {task['chance']:.3f})"
        yield f"{name}: {shown}{chance} on {task['items']} items"
        if task["items_without_right_choice"]:
            yield (f"{name}: {task['items_without_right_choice']} items have a target that is none of their choices; "
                   f"lm-evaluation-harness counts them as answered wrongly")
        if task["contexts_truncated"]:
            yield f"{name}: {task['contexts_truncated']} contexts were too long and lost their beginning"


def _share(entry: dict[str, Any]) -> str:
    """How much of the held-out text was measured, in words."""
    if entry["documents"] == entry["of_documents"]:
        return f"all {entry['documents']:,} held-out documents"
    return (f"{entry['documents']:,} of {entry['of_documents']:,} held-out documents ({entry['tokens']:,} of "
            f"{entry['of_tokens']:,} tokens)")


def metric_text(entry: dict[str, Any]) -> str:
    """0.425 ± 0.079, or only the value."""
    value = _number(entry["value"], missing="n/a")
    return value if entry["stderr"] is None else f"{value} ± {entry['stderr']:.3f}"


def as_markdown(results: dict[str, Any]) -> str:
    """The tables of results.md."""
    held, model, sampling = results["heldout"], results["model"], results["sampling"]
    sources = held["sources"] | ({"**all**": held["overall"]} if len(held["sources"]) > 1 else {})
    lines = ["# Evaluation", "",
             f"{model['parameters']:,} parameters, vocabulary {model['vocab_size']:,}, measured in {model['dtype']} "
             f"with windows of {held['window']} tokens.", "",
             "## Held-out text", "", "Bits per byte, smaller is better.", "",
             *_table(["source", "documents", "bytes", "tokens", "**model**", *MEANING, "perplexity per token"], [
                 [name, *(f"{entry[key]:,}" for key in ("documents", "bytes", "targets")),
                  f"**{entry['bits_per_byte']:.4f}**", *(f"{entry['baselines'][other]:.4f}" for other in MEANING),
                  _number(entry["perplexity"], 2, "n/a")] for name, entry in sources.items()]),
             f"Measured on {_share(held['overall'])}.", "",
             *(f"- {name}: {meaning}." for name, meaning in MEANING.items()), ""]
    if results["tasks"]:
        lines += ["## Tasks", "", *_table(
            ["task", "version", "items", "few-shot", "metric", "value ± standard error", "chance",
             "bits per byte of the right answers"],
            [[name, *(str(task[key]) for key in ("version", "items", "few_shot")), metric, metric_text(entry),
              _number(task["chance"]), _number(task["answer_bits_per_byte"])]
             for name, task in results["tasks"].items() for metric, entry in task["metrics"].items()])]
    if rows := contamination_rows(results["tasks"]):
        lines += ["### Contamination", "", "Dirty items stand in the training text: more than half of their n-grams of "
                  "13 words (docs/evaluation.md).", "", *_table(CONTAMINATION, rows)]
    lines += ["## Continuations", "", f"Temperature {sampling['temperature']}, top-p {sampling['top_p']}, seed "
              f"{sampling['seed']}.", ""]
    for entry in results["continuations"]:
        lines += [fenced(entry["prompt"] + entry["text"]), ""]
    return "\n".join(lines)


def _number(value: float | None, digits: int = 3, missing: str = "") -> str:
    return missing if value is None else f"{value:.{digits}f}"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (columns, ["---"] * len(columns), *rows)] + [""]


CONTAMINATION = ("task", "metric", "all items", "n", "clean", "n", "dirty", "n", "too short to say")
"""What the columns of `contamination_rows` are."""


def contamination_rows(tasks: Mapping[str, Any]) -> list[list[str]]:
    """The scores of all, clean and dirty items of the tasks that were looked for in the training text, a row a task and
    metric; a dash where there are no such items."""
    rows = []
    for name, task in tasks.items():
        if not (parts := task.get("contamination")):
            continue
        clean, dirty = parts["clean"], parts["dirty"]
        for metric in {**clean["metrics"], **dirty["metrics"]} or task["metrics"]:
            whole = task["metrics"].get(metric, {"value": task.get(metric), "stderr": None})
            cells = [cell for part in (clean, dirty) for cell in (
                metric_text(part["metrics"][metric]) if metric in part["metrics"] else "–", f"{part['items']:,}")]
            rows.append([name, metric, metric_text(whole), f"{task['items']:,}", *cells, f"{parts['too_short']:,}"])
    return rows


def fenced(text: str) -> str:
    """`text` as a code block of Markdown that nothing in it can end."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}text\n{text}\n{fence}"
