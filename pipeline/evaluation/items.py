"""Results of a task's single items: bits and bytes of right answers, the level of chance, scores that can be paired."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection
from typing import Any

from drover.pipeline.core.files import Record
from drover.pipeline.evaluation.paired import Form, scored

BITS = "bits_per_byte"
"""The harness's metric of whole texts, a sum over a sum of bytes."""
ANSWER_BITS = "answer_bits_per_byte"
ANSWERED = ("multiple_choice", "loglikelihood")
"""Output types of tasks that request the probability of right answers: choices, or one expected text."""


Added = tuple[float, float]
"""An item's addend to a score: (value, weight)."""


def _added_to_mean(value: Any) -> Added | None:
    return (float(value), 1.0) if isinstance(value, (int, float)) else None


def _added_to_f1(answer: tuple[Any, Any]) -> Added | None:
    """answer: the right class and the model's; 1 is the positive class."""
    gold, predicted = (int(each == 1) for each in answer)  # the sum of two numpy booleans would be one
    return 2.0 * gold * predicted, float(gold + predicted)


ADDED: dict[str, tuple[Form, Callable[[Any], Added | None]]] = {
    "mean": ("ratio", _added_to_mean),
    "bits_per_byte": ("ratio", lambda value: (-value[0] / math.log(2), float(value[1]))),
    "perplexity": ("perplexity", lambda nats: (-nats, 1.0)),
    "weighted_perplexity": ("perplexity", lambda value: (-value[0], float(value[1]))),
    "f1_score": ("f1", _added_to_f1)}
"""By the harness's name of an aggregation: its form, and an item's addend from its logged value."""


def of_items(task: Any, samples: list[Record], failed: Collection[str] = ()) -> Record:
    """Results of a task's items: `chance`, the expected accuracy of guessing, None without choices;
    `answer_bits_per_byte` of the right answers; `items_without_right_choice`, which the harness counts as wrong; and
    `per_item`.

    samples: as the harness logs them, one per item and filter. `per_item` is ready for JSON, in the order of the items:
    `hashes`, the beginning of each item's sha256; `texts`, see `item_text`; `metrics`, by name, each item's (value,
    weight) or null (see `paired.Item`); `forms`, by name, the `paired.Form` of metrics that are not plain ratios.
    Metrics that are not sums over items (mcc, bleu, chrf, ter, medians) are omitted, and `failed`: those that have no
    value for a text.
    """
    firsts = {sample["doc_id"]: sample for sample in reversed(samples)}
    order = sorted(firsts)
    metrics: dict[str, dict[int, Added]] = defaultdict(dict)
    forms: dict[str, Form] = {}
    taken = {name: ADDED[kind] for name, how in task.aggregation().items()
             if (kind := getattr(how, "__name__", "")) in ADDED and name not in failed}
    for sample in samples:
        for name in (name for name in sample["metrics"] if name in taken):
            shown, (form, added) = name if sample["filter"] == "none" else f"{name} ({sample['filter']})", taken[name]
            if (found := added(sample[name])) is not None:
                metrics[shown][sample["doc_id"]] = found
                if form != "ratio":
                    forms[shown] = form
    answers = {document: _answer(task, firsts[document]) for document in order} if task.OUTPUT_TYPE in ANSWERED else {}
    chances = [chance for chance, _ in answers.values() if chance is not None]
    right = {document: added for document, (_, added) in answers.items() if added is not None}
    if right:
        metrics[ANSWER_BITS] = right
    size = sum(weight for _, weight in right.values())
    return {"chance": math.fsum(chances) / len(chances) if chances else None,
            ANSWER_BITS: math.fsum(bits for bits, _ in right.values()) / size if size else None,
            "items_without_right_choice": len(answers) - len(right),
            "per_item": {"hashes": [firsts[document]["doc_hash"][:16] for document in order],
                         "texts": [item_text(task, firsts[document]["doc"]) for document in order], "forms": forms,
                         "metrics": {name: [known.get(document) for document in order]
                                     for name, known in metrics.items()}}}


def _answer(task: Any, sample: Record) -> tuple[float | None, Added | None]:
    """An item's share of right choices, None without choices; and the model's bits for the right answer given the
    question, with the answer's UTF-8 bytes including its leading blank, None if no choice is right. If several choices
    are right, the first counts."""
    chance, number = None, 0
    if task.OUTPUT_TYPE == "multiple_choice":
        choices, gold = right_choices(task, sample["doc"])
        chance = len(gold) / len(choices)
        if not gold:
            return chance, None
        number = gold[0]
    context, continuation = sample["arguments"][number][:2]
    nats = -sample["resps"][number][0][0]
    return chance, (nats / math.log(2), float(len((context[len(context.rstrip()):] + continuation).encode())))


def errors_of_texts(per_item: Record) -> dict[str, float]:
    """Standard errors of whole-text metrics, which the harness does not compute. per_item: see `of_items`."""
    found = {}
    for name in (BITS, "byte_perplexity", "word_perplexity"):
        stderr = scored(per_item["metrics"].get(name, ()), per_item["forms"].get(name, "ratio"))["stderr"]
        if stderr is not None:
            found[name] = stderr
    return found


def item_text(task: Any, document: Record) -> str:
    """An item's question and right answer, or the text to be predicted, without wrong choices and few-shot examples."""
    question, target = task.doc_to_text(document), task.doc_to_target(document)
    if task.OUTPUT_TYPE == "multiple_choice":
        choices, right = right_choices(task, document)
        answer = choices[right[0]] if right else ""
        return f"{answer} {target}" if task.multiple_input else f"{question} {answer}"
    return f"{question} {target[0] if isinstance(target, list) and target else target}"


def right_choices(task: Any, document: Record) -> tuple[list[str], list[int]]:
    """The choices of an item, and the numbers of the right ones: none if its target is not among the choices.

    As in the harness: with one context (`doc_to_text` is text), `doc_to_target` is the right choice, its number, or a
    list of them. With a context for each choice (`doc_to_text` is a number, as in Winograd schemas), that number is the
    right one, and `doc_to_target` is the text that follows all of them.
    """
    choices = task.doc_to_choice(document)
    gold = task.doc_to_text(document) if task.multiple_input else task.doc_to_target(document)
    golds = gold if isinstance(gold, list) else [gold]
    named = {choices.index(one) for one in golds if isinstance(one, str) and one in choices}
    return choices, sorted(named | {number for number in range(len(choices)) if number in golds})
