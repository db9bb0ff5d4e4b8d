"""Several models measured on the same items: rows of scores, and the differences between pairs of models."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import Record, sha256_file
from drover.pipeline.evaluation.items import ANSWER_BITS, BITS
from drover.pipeline.evaluation.paired import difference, scored

if TYPE_CHECKING:
    from drover.pipeline.config.evaluation import EvaluateConfig
    from drover.pipeline.contract.run import Run
    from drover.pipeline.evaluation.harness import HarnessModel
    from drover.pipeline.evaluation.kept import Kept
    from drover.pipeline.evaluation.tasks import TaskFile
    from drover.pipeline.parallel.ranks import Ranks


@dataclass(frozen=True)
class Candidate:
    """A model to compare: the name it is shown by, where it lies, and the tokens it was trained on, where known."""

    name: str
    path: Path
    tokens: int | None = None


@dataclass(frozen=True)
class Conditions:
    """The settings that are equal for all models.

    Attributes:
        tasks: to measure, in this order.
        settings: how, as the stage evaluate has it: task_limit, dtype, batch, sequence_length, bootstrap_iters.
        validation: the run whose validation documents are measured; None: none.
        documents: validation documents per source; None: all.
    """

    tasks: Sequence[TaskFile]
    settings: EvaluateConfig
    validation: Run | None = None
    documents: int | None = None


def measured(candidate: Candidate, conditions: Conditions, kept: Kept, ranks: Ranks, log: Path) -> dict[str, Record]:
    """One candidate's results by task, and for validation text if requested: those of `measure_task`, including
    `per_item`. The model is opened only if a result is not cached.

    ranks: share the requests. log: file for the harness's messages. UserError if the windows exceed the model's
    context.
    """
    settings, validation = conditions.settings, conditions.validation

    @cache
    def harness() -> HarnessModel:
        import torch

        from drover.pipeline.evaluation.harness import HarnessModel
        from drover.pipeline.evaluation.open_model import open_model
        from drover.pipeline.evaluation.prompts import eos_ids

        opened = open_model(candidate.path, ranks.device, getattr(torch, settings.dtype), ranks=ranks)
        try:
            return HarnessModel(opened.placed, opened.tokenizer, batch=settings.batch, length=settings.sequence_length,
                                ranks=ranks, ends=eos_ids(opened))
        except UserError as error:
            raise UserError(f"{candidate.name}: {error}") from None

    def by_task(task: TaskFile) -> Record:
        from drover.pipeline.evaluation.running import measure_task

        return measure_task(harness(), task, settings.task_limit, settings.bootstrap_iters, log)

    own: Record = {"weights": weights_identity(candidate.path), "dtype": settings.dtype,
                   "length": settings.sequence_length}
    found = {}
    for task in conditions.tasks:
        decides = {**own, "task": [[name, sha256_file(path)] for name, path in task.inputs()],
                   "limit": settings.task_limit, "bootstrap_iters": settings.bootstrap_iters}
        found[task.name] = kept.get(f"{candidate.name} {task.name}", decides, partial(by_task, task))
    if validation is not None:
        decides = {**own, "text": validation.finished("shard").digest, "documents": conditions.documents}
        found[f"validation text of {validation.config.name}"] = kept.get(
            f"{candidate.name} validation text", decides,
            lambda: _validation(harness(), validation, conditions.documents))
    return found


def _validation(harness: HarnessModel, run: Run, documents: int | None) -> Record:
    """Bits per byte on a run's validation documents, as in the stage evaluate. Each model uses its own tokenizer; the
    bytes are the same. UserError if there are none."""
    from drover.pipeline.data.text_shards import read_shard, shard_records

    folder, manifest = run.stage_folder("shard"), run.finished("shard")
    texts: dict[str, str] = {}
    for source in dict.fromkeys(record["source"] for record in shard_records(manifest, "validation")):
        records = sorted(shard_records(manifest, "validation", source), key=lambda record: str(record["path"]))
        read = (document for record in records for document in read_shard(folder, record))
        texts |= {f"{source}/{document.key}": document.text for document in islice(read, documents)}
    if not texts:
        raise UserError(f"The run {run.folder} has no validation text. Omit --validation, or give a run with "
                        f"shard.validation_share above 0.")
    ids = [[harness.prefix_token_id, *harness.tok_encode(text), harness.eot_token_id] for text in texts.values()]
    items = [(-value / math.log(2), float(len(text.encode())))
             for value, text in zip(harness.documents(ids), texts.values(), strict=True)]
    return {"metrics": {BITS: scored(items)}, "items": len(items), "few_shot": 0, "version": manifest.digest[:12],
            "chance": None, "contexts_truncated": 0,
            "per_item": {"hashes": list(texts), "forms": {}, "metrics": {BITS: items}}}


def weights_identity(path: Path) -> list[list[Any]]:
    """Names, sizes and times of a model's files, at any depth. If they differ, the model is measured again."""
    from drover.pipeline.formats.weights import open_weights

    with open_weights(path) as weights:
        folder = weights.path
    return [[file.relative_to(folder).as_posix(), file.stat().st_size, file.stat().st_mtime_ns]
            for file in sorted(folder.rglob("*")) if file.is_file()]


def rows(candidate: Candidate, parts: dict[str, Record]) -> list[Record]:
    """A model's scores, one row a task and metric, each with everything that it needs to be read alone."""
    found = []
    for name, part in parts.items():
        metrics, of_answers = part["metrics"], part["per_item"]["metrics"].get(ANSWER_BITS)
        if of_answers is not None:
            metrics = {**metrics, ANSWER_BITS: scored(of_answers)}
        found += [{"model": candidate.name, "tokens": candidate.tokens, "task": name, "version": part["version"],
                   "metric": metric, "n": part["items"], "few_shot": part["few_shot"], **entry,
                   "chance": part["chance"] if metric.startswith("acc") else None,
                   "contexts_truncated": part["contexts_truncated"]} for metric, entry in metrics.items()]
    return found


def differences(pairs: Iterable[tuple[Candidate, Candidate]], measured: dict[str, dict[str, Record]]) -> list[Record]:
    """One row a pair, task and metric that can be paired; `measured` has each candidate's parts by its name."""
    found = []
    for first, second in pairs:
        for name, part in measured[first.name].items():
            one, other = part["per_item"], measured[second.name][name]["per_item"]
            assert one["hashes"] == other["hashes"], "both measured the same items"
            for metric, items in one["metrics"].items():
                found.append({"first": first.name, "second": second.name, "task": name, "metric": metric,
                              **asdict(difference(items, other["metrics"][metric],
                                                  one["forms"].get(metric, "ratio")))})
    return found
