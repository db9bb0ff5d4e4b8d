"""What the finished model does: validation text, tasks, samples, and the proof of its export."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter

from drover.pipeline.core.files import Record
from drover.pipeline.evaluation.items import ANSWER_BITS, BITS
from drover.pipeline.evaluation.results import doubts, metric_text, score_texts
from drover.pipeline.reporting.document import (
    ALL,
    Bars,
    Block,
    Lines,
    Series,
    Table,
    Text,
    filled,
    flat,
    spread,
    words,
)
from drover.pipeline.reporting.facts import Facts

MOST_SAMPLES = 4
"""Steps of training whose texts are shown."""
MOST_ROWS = 12
"""Checkpoints in their table."""
SPLIT = ("clean", "dirty")
"""The items of a task without and with contamination."""
SIDES = {"transformers, on the export": "transformers", "training model": "training",
         "single precision itself": "single_precision"}
"""What was compared with a float64 forward pass, and the prefix of its counts."""


def validation(facts: Facts) -> Iterator[Block]:
    """Bits per byte of each source and of all, next to those of compressors; empty without validation text."""
    if not (result := facts.validation):
        return
    total = result["overall"]
    yield filled("{overall[documents]:documents} that training did not see, {overall[bytes]:,} bytes, "
                 "{overall[targets]:,} tokens, in windows of {window:,} tokens. Bits per byte do not depend on the "
                 "tokenizer; lower is better.", result)
    bars = {**total["baselines"], facts.config.name: total["bits_per_byte"]}
    known = sorted((value, name) for name, value in bars.items() if value is not None)
    yield Bars("Bits per byte of validation text", {name: value for value, name in known}, facts.config.name)
    entries = {**result["sources"], **({ALL: total} if len(result["sources"]) > 1 else {})}
    rows = flat(entries, "name")
    yield Table("Bits per byte by source", {
        "source": "{name}", "model": "{bits_per_byte:.4f}",
        **{name: f"{{baselines[{name}]:.4f}}" for name in total["baselines"]}, "byte entropy": "{entropy:.4f}"},
        rows, " ".join(f"{name}: {meaning}." for name, meaning in facts.results.get(
            "definitions", {}).items() if name in total["baselines"]))
    yield Table("Validation text by source", {
        "source": "{name}", "perplexity": "{perplexity:.3f}", "documents": "{documents:,} of {of_documents:,}",
        "bytes": "{bytes:,}", "tokens": "{targets:,}",
        "training text for xz": "{training_bytes:B} of {of_training_bytes:B}"}, rows)


def tasks(facts: Facts) -> Iterator[Block]:
    """Scores of lm-evaluation-harness, and those without contaminated items; empty if no task was run."""
    result = facts.results.get("tasks", {})
    yield Table("Task results", {
        "task": "{name}", "version": "{version}", "metric": "{metric}", "value": "{value:.3f}",
        "std. error": "{stderr:.3f}", "chance": "{guessing:.3f}", "items": "{items:,}",
        "items in the file": "{items_in_file:,}", "few-shot": "{few_shot:n}",
        "answer bits per byte": "{answer_bits_per_byte:.3f}", "std. error of bits": "{answer_bits_stderr:.3f}",
        "data set": "{data}"}, [
        # Chance is the share of right choices in blind guessing: a baseline of accuracies, not of other metrics.
        {**task, **entry, "name": name, "metric": metric,
         "guessing": task.get("chance") if metric.startswith("acc") else None}
        for name, task in result.items() for metric, entry in task["metrics"].items()],
        filled("Metrics are those of lm_eval {versions[lm_eval]}. Answer bits per byte: the model's bits per byte of "
               "the right answers, smoother than accuracy. Std. error: {definitions[stderr]}. Chance: "
               "{definitions[chance]}.", facts.results))
    yield Table("Groups and suites", {
        "name": "{name}", "metric": "{metric}", "value": "{value:.3f}", "std. error": "{stderr:.3f}",
        "chance": "{chance:.3f}", "centred": "{centred:.3f}", "tasks": "{of}"}, [
        *({**group, **entry, "name": name, "metric": metric, "of": len(group["tasks"])}
          for name, group in facts.results.get("groups", {}).items() for metric, entry in group["metrics"].items()),
        *(row for name, suite in facts.results.get("suites", {}).items() for row in (
            {**suite, "name": name, "metric": "mean", "centred": suite["value"] if suite["centred"] else None,
             "value": None if suite["centred"] else suite["value"], "of": f"{len(suite['members'])} of {suite['of']}"},
            *({**member, "name": f"{name}: {task}"} for task, member in suite["members"].items())))],
        filled("Suites: {definitions[suites]}.", facts.results))
    yield Table("Contamination", {"task": "{task}", "items": "{which}", "number": "{items:,}", "scores": "{scores}"}, [
        {"task": name, "which": which, **part, "scores": {
            metric: metric_text(entry) for metric, entry in part["metrics"].items()}}
        for name, task in result.items() for which, part in task.get("contamination", {}).items() if which in SPLIT],
        filled("Scores ± standard error; {definitions[contamination]}.", facts.results))
    yield from (f"{doubt}." for doubt in doubts(result))


def scores(facts: Facts) -> Iterator[Block]:
    """Curves of the scores of checkpoints, and of the finished model at their end; empty without scored checkpoints."""
    if not facts.scores:
        return
    yield from score_charts({"score": facts})
    yield Table("Scores of checkpoints", {
        "step": "{step:,}", "tokens": "{tokens:,}", "training FLOPs": "{flops:.2e}",
        "bits per byte": "{validation[overall][bits_per_byte]:.4f}", "tasks": "{scores}"},
        [{**row, "scores": "; ".join(score_texts(row["tasks"]))} for row in spread(score_rows(facts), MOST_ROWS)],
        "± is a standard error; train/scores has all scores.")


def score_rows(facts: Facts) -> list[Record]:
    """The scores of checkpoints, and at their end those of the finished model."""
    rows: list[Record] = [vars(scores) for scores in facts.scores]
    if facts.results and rows[-1]["step"] < (counts := facts.counts("train"))["steps"]:
        rows.append({**facts.results, "step": counts["steps"], "tokens": counts["tokens"]})
    return rows


def score_charts(runs: Mapping[str, Facts]) -> Iterator[Lines]:
    """For each score that some run has, a chart over each measure of what training has used, with the level of chance.
    runs: by the name of their lines."""
    names = dict.fromkeys(key for facts in runs.values()
                          for key in score_curves(score_rows(facts), itemgetter("tokens")))
    for over in ("tokens", "FLOPs"):
        for name, metric in names:
            curves = {run: points for run, facts in runs.items() if (
                points := score_curves(score_rows(facts), facts.measures[over]).get((name, metric)))}
            every = [point for points in curves.values() for point in points]
            chance, *others = dict.fromkeys(level for *_, level in every)
            ends = min(every)[0], max(every)[0]
            by_chance = [Series("by chance", ends, (chance, chance), faint=True)] if chance and not others else []
            notes = ["Bands are standard errors."] * any(error for _, _, error, _ in every)
            notes += [f"Only {', '.join(curves)} has this score."] * (len(curves) < len(runs))
            yield Lines(f"{name}, {words(metric)} over {over}", "",
                        [*by_chance, *map(score_series, curves, curves.values())], " ".join(notes),
                        from_zero=bool(by_chance), over=over)


ScorePoint = tuple[float, float, float, float | None]
"""What training has used, score, standard error, and for accuracies the level of chance."""


def score_curves(rows: Sequence[Record], measure: Callable[[Record], float]
                 ) -> dict[tuple[str, str], list[ScorePoint]]:
    """The points of each score by task, or `validation text`, and metric. rows: `tokens`, and `validation` and `tasks`
    as in results.json."""
    curves = defaultdict[tuple[str, str], list[ScorePoint]](list)
    for row in rows:
        suites = {name: {**suite, "metrics": {"score": suite}} for name, suite in row.get("suites", {}).items()}
        entries = {"validation text": {"metrics": {}, BITS: row["validation"]["overall"][BITS]},
                   **suites, **row.get("groups", {}), **row["tasks"]}
        for name, task in entries.items():
            bits = BITS if BITS in task else ANSWER_BITS
            answers = {"value": task.get(bits), "stderr": task.get("answer_bits_stderr")}
            for metric, entry in {**task["metrics"], bits: answers}.items():
                if entry["value"] is not None:
                    curves[name, metric].append((measure(row), entry["value"], entry.get("stderr") or 0.0,
                                                 task.get("chance") if metric.startswith(("acc", "score")) else None))
    return curves


def score_series(name: str, points: Sequence[ScorePoint]) -> Series:
    """A line of scores."""
    x, y, errors, _ = zip(*points, strict=True)
    return Series(name, x, y, errors=errors)


def samples(facts: Facts) -> Iterator[Block]:
    """Every continuation by the finished model, then the first prompt's at a few steps of training."""
    if sampling := facts.results.get("sampling"):
        yield filled("Each text continues the prompt in bold, sampled at temperature {temperature}, top-p {top_p}. "
                     "Nothing was selected.", sampling)
    for number, entry in enumerate(facts.results.get("continuations", []), start=1):
        ended = "ended its document" if entry.get("ended") else filled("cut after {tokens} tokens", entry)
        yield Text(f"Finished model, prompt {number}: {ended}", entry["text"], entry["prompt"])
    # A step that was repeated has several; the last one counts.
    by_step = {sample["step"]: sample for sample in facts.samples if sample["prompt"] == facts.samples[0]["prompt"]}
    for step in spread(sorted(by_step), MOST_SAMPLES):
        yield Text(f"Sample during training, step {step:,}", by_step[step]["text"], by_step[step]["prompt"])


def export(facts: Facts) -> Iterator[Block]:
    """The exported model, compared with the checkpoint; empty if nothing was compared."""
    counts = facts.counts("convert")
    if "transformers_logit_error" not in counts:
        return
    yield filled(
        "{tensors_compared:,} tensors of the export equal the checkpoint's, bit for bit. On {tokens_compared:,} "
        "validation tokens, the exported model in transformers and the training model were each compared with a "
        "float64 forward pass of the checkpoint ({layers_compared:,} of {layers:,} layers). The most likely next token "
        "was the same for {argmax_equal:,} tokens.", {**counts, "layers": facts.config.model.layers})
    yield Table("Largest difference from float64", {
        "float32 arithmetic of": "{title}", "logits": "{logits:n}"},
        [{"title": title, "logits": counts[f"{key}_logit_error"]} for title, key in SIDES.items()],
        filled("The limit for either model is {factor:n} times the difference of single precision itself. The largest "
               "logit is {largest_logit:n}.", counts))
