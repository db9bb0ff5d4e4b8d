"""What a task's single items tell: bits and bytes of right answers, the level of chance, scores that can be paired."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from drover.pipeline.evaluation.paired import Form, score

BITS = "bits_per_byte"
"""The harness's metric of whole texts, a sum over a sum of bytes."""
ANSWER_BITS = "answer_bits_per_byte"


@dataclass(frozen=True)
class Answer:
    """The right answer of an item.

    Attributes:
        chance: right choices / choices; None where there are no choices.
        bits: that the model needs for the answer given the question; None where no choice is right.
        size: UTF-8 bytes of the answer, with the blank that it begins with.
    """

    chance: float | None
    bits: float | None
    size: int


def answers(task: Any) -> dict[int, Answer]:
    """By item, for a task of choices or of one text to be expected (`loglikelihood`); empty for others. The task's
    requests are answered. Of several right choices the first counts."""
    if task.OUTPUT_TYPE not in ("multiple_choice", "loglikelihood"):
        return {}
    by_document: dict[int, list[Any]] = defaultdict(list)
    for instance in task.instances:
        by_document[instance.doc_id].append(instance)
    found = {}
    for document, instances in sorted(by_document.items()):
        chance, right = None, instances[0]
        if task.OUTPUT_TYPE == "multiple_choice":
            choices, gold = right_choices(task, instances[0].doc)
            chance = len(gold) / len(choices)
            if not gold:
                found[document] = Answer(chance, None, 0)
                continue
            right = next(instance for instance in instances if instance.idx == gold[0])
        context, continuation = right.args[:2]
        size = len((context[len(context.rstrip()):] + continuation).encode())
        found[document] = Answer(chance, -right.resps[0][0] / math.log(2), size)
    return found


def answer_summary(found: dict[int, Answer]) -> dict[str, Any]:
    """The share right of blind guessing (None without choices), the bits per byte of the right answers, and how many
    items have no right choice, which the harness counts as answered wrongly."""
    chances = [answer.chance for answer in found.values() if answer.chance is not None]
    known = [answer for answer in found.values() if answer.bits is not None]
    size = sum(answer.size for answer in known)
    return {"chance": math.fsum(chances) / len(chances) if chances else None,
            ANSWER_BITS: math.fsum(answer.bits or 0.0 for answer in known) / size if size else None,
            "items_without_right_choice": len(found) - len(known)}


def _added_to_mean(value: Any) -> tuple[float, float] | None:
    return (float(value), 1.0) if isinstance(value, (int, float)) else None


def _added_to_f1(answer: tuple[Any, Any]) -> tuple[float, float] | None:
    """answer: the right class and the model's, of which 1 is the positive one."""
    gold, predicted = (int(each == 1) for each in answer)  # numpy's truths would add up to one
    return 2.0 * gold * predicted, float(gold + predicted)


ADDED: dict[str, tuple[Form, Callable[[Any], tuple[float, float] | None]]] = {
    "mean": ("ratio", _added_to_mean),
    "bits_per_byte": ("ratio", lambda value: (-value[0] / math.log(2), float(value[1]))),
    "perplexity": ("perplexity", lambda nats: (-nats, 1.0)),
    "weighted_perplexity": ("perplexity", lambda value: (-value[0], float(value[1]))),
    "f1_score": ("f1", _added_to_f1)}
"""By the harness's name of how a metric is aggregated: its form, and the (value, weight) of what it logs of an item."""


def item_scores(task: Any, samples: list[dict[str, Any]], single: dict[int, Answer]) -> dict[str, Any]:
    """What each item adds to the scores that are sums of values over sums of weights, or made of these.

    samples: as the harness logs them, one an item and filter. single: what `answers` tells. Returns, ready for JSON, in
    the order of the items: `hashes`, the beginning of each one's sha256; `texts`, see `item_text`; `metrics`, by name,
    the (value, weight) of each or null (see `paired.Item`); `forms`, by name, the `paired.Form` of those that are no
    plain ratio. Metrics that are more than sums of what single items add (mcc, bleu, chrf, ter, medians) are left out.
    """
    hashes: dict[int, str] = {}
    texts: dict[int, str] = {}
    metrics: dict[str, dict[int, tuple[float, float]]] = defaultdict(dict)
    taken = {name: ADDED[kind] for name, how in task.aggregation().items()
             if (kind := getattr(how, "__name__", "")) in ADDED}
    forms: dict[str, Form] = {}
    for sample in samples:
        if sample["doc_id"] not in hashes:
            hashes[sample["doc_id"]] = sample["doc_hash"][:16]
            texts[sample["doc_id"]] = item_text(task, sample["doc"])
        for name in sample["metrics"]:
            shown = name if sample["filter"] == "none" else f"{name} ({sample['filter']})"
            if name in taken and (found := taken[name][1](sample[name])) is not None:
                metrics[shown][sample["doc_id"]] = found
                if taken[name][0] != "ratio":
                    forms[shown] = taken[name][0]
    for document, answer in single.items():
        if answer.bits is not None:
            metrics[ANSWER_BITS][document] = (answer.bits, float(answer.size))
    order = sorted(hashes)
    return {"hashes": [hashes[document] for document in order], "texts": [texts[document] for document in order],
            "forms": forms, "metrics": {name: [known.get(document) for document in order]
                        for name, known in metrics.items()}}


def errors_of_texts(per_item: dict[str, Any]) -> dict[str, float]:
    """Standard errors of the metrics of whole texts, for which the harness has none. per_item: see `item_scores`."""
    found = {}
    for name in (BITS, "byte_perplexity", "word_perplexity"):
        _, stderr = score(per_item["metrics"].get(name, ()), per_item["forms"].get(name, "ratio"))
        if stderr is not None:
            found[name] = stderr
    return found


def item_text(task: Any, document: dict[str, Any]) -> str:
    """Question and right answer of an item, or the text to be predicted; no wrong choices, no few-shot examples."""
    question, target = task.doc_to_text(document), task.doc_to_target(document)
    if task.OUTPUT_TYPE == "multiple_choice":
        choices, right = right_choices(task, document)
        answer = choices[right[0]] if right else ""
        return f"{answer} {target}" if task.multiple_input else f"{question} {answer}"
    return f"{question} {target[0] if isinstance(target, list) and target else target}"


def right_choices(task: Any, document: dict[str, Any]) -> tuple[list[str], list[int]]:
    """The choices of an item, and the numbers of the right ones: none where its target is not among them.

    As the harness has it: with one context (`doc_to_text` is text), `doc_to_target` is the right choice, its number, or
    several; with a context for each choice (`doc_to_text` is a number, as in Winograd schemas), that number is the
    right one and `doc_to_target` is the text that follows all of them.
    """
    choices = task.doc_to_choice(document)
    gold = task.doc_to_text(document) if task.multiple_input else task.doc_to_target(document)
    golds = gold if isinstance(gold, list) else [gold]
    named = {choices.index(one) for one in golds if isinstance(one, str) and one in choices}
    return choices, sorted(named | {number for number in range(len(choices)) if number in golds})
