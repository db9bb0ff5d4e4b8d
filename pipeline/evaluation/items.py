"""Results of a task's single items: bits and bytes of right answers, the level of chance, scores that can be paired."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NotRequired, TypedDict

from drover.pipeline.evaluation.scores import Item, Score, scored
from drover.pipeline.evaluation.tasks import template_fields

BITS = "bits_per_byte"
"""The harness's metric of whole texts, a sum over a sum of bytes."""
ANSWER_BITS = "answer_bits_per_byte"
ANSWERED = ("multiple_choice", "loglikelihood")
"""Output types of tasks that request the probability of right answers: choices, or one expected text."""
ADDENDS: dict[str, Callable[[Any], Item]] = {
    "mean": lambda value: (float(value), 1.0) if isinstance(value, (int, float)) else None,
    BITS: lambda value: (-value[0] / math.log(2), float(value[1]))}
"""By the harness's name of an aggregation: an item's addend from its logged value."""


class PerItem(TypedDict):
    """In the order of the items: `hashes`, the beginning of each item's sha256; `texts`, see `item_text`, and again of
    their fields alone where the question has a template; `metrics`, by name, each item's (value, weight) or null.
    Metrics that are not means or bits per byte are omitted."""

    hashes: list[str]
    texts: list[str]
    metrics: dict[str, list[Item]]


class ItemResults(TypedDict):
    """chance: the expected accuracy of guessing; None without choices. answer_bits_per_byte: of the right answers;
    answer_bits_stderr: its standard error. items_without_right_choice: their numbers, from 1; the harness counts them
    as wrong."""

    chance: float | None
    answer_bits_per_byte: float | None
    answer_bits_stderr: NotRequired[float | None]
    items_without_right_choice: list[int]
    per_item: PerItem


class TaskResult(ItemResults):
    """What is measured of a task. without_value: why metrics have none. contamination: see `contamination.py`. data:
    `OWNER/NAME@COMMIT` of a fetched data set."""

    metrics: dict[str, Score]
    items: int
    items_in_file: int
    few_shot: int
    kind: str
    version: str
    contexts_truncated: int
    without_value: dict[str, str]
    contamination: NotRequired[dict[str, Any]]
    data: NotRequired[str]


def shown_name(metric: str, filter_name: str) -> str:
    """A metric's name in results."""
    return metric if filter_name == "none" else f"{metric} ({filter_name})"


def item_results(task: Any, samples: Sequence[Mapping[str, Any]]) -> ItemResults:
    """Results of a task's items. samples: as the harness logs them, one per item and filter."""
    firsts = {sample["doc_id"]: sample for sample in reversed(samples)}
    documents = [firsts[number] for number in sorted(firsts)]
    addends: dict[str, dict[int, Item]] = defaultdict(dict)
    kinds = {metric: getattr(how, "__name__", "") for metric, how in task.aggregation().items()}
    for sample in samples:
        for metric in sample["metrics"]:
            if addend := ADDENDS.get(kinds.get(metric, "")):
                addends[shown_name(metric, sample["filter"])][sample["doc_id"]] = addend(sample[metric])
    template = task.get_config("doc_to_text")
    named = template_fields(template) if isinstance(template, str) else []
    metrics = {metric: [values.get(number) for number in sorted(firsts)] for metric, values in addends.items()}
    answers = [_answer(task, document) for document in documents] if task.OUTPUT_TYPE in ANSWERED else []
    chances = [chance for chance, _ in answers if chance is not None]
    right = [answer for _, answer in answers]
    answered: Score = {"value": None, "stderr": None}
    if any(right):
        metrics[ANSWER_BITS] = right
        answered = scored(right)
    return {"chance": math.fsum(chances) / len(chances) if chances else None,
            "answer_bits_per_byte": answered["value"], "answer_bits_stderr": answered["stderr"],
            "items_without_right_choice": [
                documents[place]["doc_id"] + 1 for place, answer in enumerate(right) if answer is None],
            "per_item": {"hashes": [document["doc_hash"][:16] for document in documents],
                         "texts": [item_text(task, document["doc"], fields) for fields in ([], *[named] * bool(named))
                                   for document in documents], "metrics": metrics}}


def _answer(task: Any, sample: Mapping[str, Any]) -> tuple[float | None, Item]:
    """An item's share of right choices, None without choices; and the model's bits for the right answer given the
    question, with the answer's UTF-8 bytes including its leading blank, None if no choice is right. If several choices
    are right, the first counts."""
    chance = None
    number = 0
    if task.OUTPUT_TYPE == "multiple_choice":
        choices, gold = right_choices(task, sample["doc"])
        chance = len(gold) / len(choices)
        if not gold:
            return chance, None
        number = gold[0]
    context, continuation = sample["arguments"][number][:2]
    nats = -sample["resps"][number][0][0]
    return chance, (nats / math.log(2), float(len((context[len(context.rstrip()):] + continuation).encode())))


def item_text(task: Any, document: Any, fields: Sequence[str] = ()) -> str:
    """An item's question and right answer, or the text to be predicted, without wrong choices and few-shot examples.
    fields: of the question these fields alone, without the words of its template."""
    question = " ".join(str(document.get(name, "")) for name in fields) or task.doc_to_text(document)
    target = task.doc_to_target(document)
    if task.OUTPUT_TYPE == "multiple_choice":
        choices, right = right_choices(task, document)
        answer = choices[right[0]] if right else ""
        return f"{answer} {target}" if task.multiple_input else f"{question} {answer}"
    return f"{question} {target[0] if isinstance(target, list) and target else target}"


def right_choices(task: Any, document: Any) -> tuple[list[str], list[int]]:
    """The choices of an item, and the numbers of the right ones: none if its target is not among the choices.

    As in the harness: with one context (`doc_to_text` is text), `doc_to_target` is the right choice, its number, or a
    list of them. With a context for each choice (`doc_to_text` is a number, as in Winograd schemas), that number is the
    right one, and `doc_to_target` is the text that follows all of them.
    """
    choices = task.doc_to_choice(document)
    gold = task.doc_to_text(document) if task.multiple_input else task.doc_to_target(document)
    golds = gold if isinstance(gold, list) else [gold]
    return choices, [number for number, choice in enumerate(choices)
                     if number in golds or (choice in golds and choices.index(choice) == number)]
