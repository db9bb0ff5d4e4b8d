"""Several models measured on the same items: rows of scores, with differences from the first model."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import Record
from drover.pipeline.evaluation.items import ANSWER_BITS, BITS
from drover.pipeline.evaluation.paired import difference, scored

if TYPE_CHECKING:
    from drover.pipeline.config.evaluation import EvaluateConfig
    from drover.pipeline.contract.run import Run
    from drover.pipeline.evaluation.harness import HarnessModel
    from drover.pipeline.evaluation.tasks import TaskFile
    from drover.pipeline.parallel.ranks import Ranks


def measured(path: Path, tasks: Sequence[TaskFile], validation: Run | None, settings: EvaluateConfig,
             ranks: Ranks) -> dict[str, Record]:
    """One model's results by task, and for validation text if requested: those of `measure_task`, including
    `per_item`.

    Args:
        validation: the run whose validation documents are measured; None: none.
        settings: task_limit, dtype, batch, sequence_length, as the stage evaluate has them. The limit also holds for
            the validation documents of each source.
        ranks: share the requests.

    Raises:
        UserError: the windows exceed the model's context, or a task cannot be measured.
    """
    import torch

    from drover.pipeline.evaluation.harness import HarnessModel
    from drover.pipeline.evaluation.open_model import open_model
    from drover.pipeline.evaluation.running import measure_task

    opened = open_model(path, ranks.device, getattr(torch, settings.dtype), ranks=ranks)
    try:
        model = HarnessModel(opened, batch=settings.batch, length=settings.sequence_length, ranks=ranks)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    results = {task.name: measure_task(model, task, settings.task_limit, settings.bootstrap_iters, Path(os.devnull))
               for task in tasks}
    if validation is not None:
        results[f"validation text of {validation.config.name}"] = _validation(model, validation, settings.task_limit)
    return results


def _validation(model: HarnessModel, run: Run, documents: int | None) -> Record:
    """Bits per byte on a run's validation documents, as in the stage evaluate: cut into windows that overlap by one
    token. Each model uses its own tokenizer; the bytes are the same. UserError if there are no documents."""
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
    tokenizer = model.opened.tokenizer
    length = model.max_length
    windows = []
    for text in texts.values():
        ids = [tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id]
        windows.append([(ids[start:start + 1], ids[start + 1:start + 1 + length])
                        for start in range(0, len(ids) - 1, length)])
    items = [(-value / math.log(2), float(len(text.encode())))
             for value, text in zip(model.summed(windows), texts.values(), strict=True)]
    return {"metrics": {BITS: scored(items)}, "items": len(items), "few_shot": 0, "version": manifest.digest[:12],
            "chance": None, "items_without_right_choice": 0, "without_value": {}, "contexts_truncated": 0,
            "per_item": {"hashes": list(texts), "metrics": {BITS: items}}}


def rows(results: dict[str, dict[str, Record]]) -> list[Record]:
    """A row a task, metric and model: its score, and its difference from the first model on the same items.

    results: of `measured`, by the models' names. UserError if two models had other items.
    """
    first, *others = results
    table = []
    for task, part in results[first].items():
        for other in others:
            if results[other][task]["per_item"]["hashes"] != part["per_item"]["hashes"]:
                raise UserError(f"{first} and {other} were measured on different items of the task {task}: its data "
                                f"changed in between. Compare them again.")
        of_items = part["per_item"]["metrics"]
        for metric in [*part["metrics"], *([ANSWER_BITS] if ANSWER_BITS in of_items else [])]:
            table += [_row(task, metric, model, results[model][task], None if model == first else part)
                      for model in results]
    return table


def _row(task: str, metric: str, model: str, part: Record, first: Record | None) -> Record:
    """first: the first model's results; None for its own row."""
    items = part["per_item"]["metrics"].get(metric)
    before = None if first is None else first["per_item"]["metrics"].get(metric)
    compared = difference(before, items) if before and items else {}
    score = scored(items) if metric == ANSWER_BITS else part["metrics"][metric]
    return {"task": task, "version": part["version"], "few_shot": part["few_shot"], "metric": metric,
            "n": part["items"], "model": model, **score, "chance": part["chance"] if metric.startswith("acc") else None,
            **compared}
