"""Several models measured on the same items: rows of scores, and the differences between pairs of models."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import sha256_file
from drover.pipeline.evaluation.items import ANSWER_BITS, BITS
from drover.pipeline.evaluation.paired import difference, score

if TYPE_CHECKING:
    from drover.pipeline.contract.run import Run
    from drover.pipeline.evaluation.harness import HarnessModel
    from drover.pipeline.evaluation.kept import KeptParts
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
    """What is equal for all models.

    Attributes:
        tasks: to measure, in this order.
        limit: items per task; None: all.
        dtype: arithmetic, float32 or bfloat16.
        batch: sequences per forward pass.
        length: tokens per window; None: each model's context.
        bootstrap_iters: draws for standard errors without a formula.
        heldout: the run whose held-out documents are measured; None: none.
        documents: held-out documents per source; None: all.
    """

    tasks: Sequence[TaskFile]
    limit: int | None = None
    dtype: str = "float32"
    batch: int = 16
    length: int | None = None
    bootstrap_iters: int = 100_000
    heldout: Run | None = None
    documents: int | None = None

    @property
    def heldout_name(self) -> str:
        """The row of held-out text."""
        return f"held-out text of {self.heldout.config.name}" if self.heldout else ""

    @cached_property
    def heldout_texts(self) -> dict[str, str]:
        """The held-out documents by source and key; UserError where there are none."""
        from drover.pipeline.data.text_shards import read_shard, shard_records

        assert self.heldout is not None
        folder, manifest = self.heldout.stage_folder("shard"), self.heldout.finished("shard")
        found: dict[str, str] = {}
        for source in dict.fromkeys(record["source"] for record in shard_records(manifest, "heldout")):
            records = sorted(shard_records(manifest, "heldout", source), key=lambda record: str(record["path"]))
            documents = (document for record in records for document in read_shard(folder, record))
            for number, document in enumerate(documents):
                if self.documents is not None and number >= self.documents:
                    break
                found[f"{source}/{document.key}"] = document.text
        if not found:
            raise UserError(f"The run {self.heldout.folder} has no held-out text. Leave --heldout out, or give a run "
                            f"with shard.heldout_share above 0.")
        return found


def measured(candidate: Candidate, conditions: Conditions, kept: KeptParts, ranks: Ranks,
             log: Path) -> dict[str, dict[str, Any]]:
    """One candidate's parts, by task, and by `Conditions.heldout_name` where that is asked for: what
    `TaskRunner.measure` tells, `per_item` included. The model is opened when the first is measured that was not kept.

    ranks: share the requests. log: for what the harness says. UserError for windows that the model cannot take.
    """
    @cache
    def harness() -> HarnessModel:
        import torch

        from drover.pipeline.evaluation.harness import HarnessModel
        from drover.pipeline.evaluation.open_model import open_model

        opened = open_model(candidate.path, ranks.device, getattr(torch, conditions.dtype))
        try:
            return HarnessModel(opened.model, opened.tokenizer, batch=conditions.batch, rank=ranks.rank,
                                world=ranks.world, length=conditions.length)
        except UserError as error:
            raise UserError(f"{candidate.name}: {error}") from None

    def by_task(task: TaskFile) -> dict[str, Any]:
        from drover.pipeline.evaluation.running import TaskRunner

        return TaskRunner(harness(), conditions.limit, conditions.bootstrap_iters,
                          log if ranks.leads else None).measure(task)

    own = {"weights": weights_identity(candidate.path), "dtype": conditions.dtype, "length": conditions.length}
    found = {}
    for task in conditions.tasks:
        decides = {**own, "task": [[name, sha256_file(path)] for name, path in task.inputs()],
                   "limit": conditions.limit, "bootstrap_iters": conditions.bootstrap_iters}
        found[task.name] = kept.get(f"{candidate.name} {task.name}", decides, partial(by_task, task))
    if conditions.heldout is not None:
        decides = {**own, "text": conditions.heldout.finished("shard").digest, "documents": conditions.documents}
        found[conditions.heldout_name] = kept.get(f"{candidate.name} held-out text", decides,
                                                  lambda: _heldout(harness(), conditions))
    return found


def _heldout(harness: HarnessModel, conditions: Conditions) -> dict[str, Any]:
    """Bits per byte over the documents, as the stage evaluate has it. Each model reads the text by its own tokenizer;
    the bytes are the same."""
    assert conditions.heldout is not None
    texts = conditions.heldout_texts
    ids = [[harness.prefix_token_id, *harness.tok_encode(text), harness.eot_token_id] for text in texts.values()]
    items = [(-value / math.log(2), float(len(text.encode())))
             for value, text in zip(harness.documents(ids), texts.values(), strict=True)]
    value, stderr = score(items)
    return {"metrics": {BITS: {"value": value, "stderr": stderr}}, "items": len(items), "few_shot": 0,
            "version": conditions.heldout.finished("shard").digest[:12], "chance": None,
            "contexts_truncated": 0, "per_item": {"hashes": list(texts), "forms": {}, "metrics": {BITS: items}}}


def weights_identity(path: Path) -> list[list[Any]]:
    """Names, sizes and times of the files of a model, at any depth: another of them is measured again."""
    from drover.pipeline.formats.weights import open_weights

    with open_weights(path) as weights:
        folder = weights.path
    return [[file.relative_to(folder).as_posix(), file.stat().st_size, file.stat().st_mtime_ns]
            for file in sorted(folder.rglob("*")) if file.is_file()]


def rows(candidate: Candidate, parts: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """A model's scores, one row a task and metric, each with everything that it needs to be read alone."""
    found = []
    for name, part in parts.items():
        metrics = dict(part["metrics"])
        if (items := part["per_item"]["metrics"].get(ANSWER_BITS)) is not None:
            value, stderr = score(items)
            metrics[ANSWER_BITS] = {"value": value, "stderr": stderr}
        for metric, entry in metrics.items():
            found.append({"model": candidate.name, "tokens": candidate.tokens, "task": name,
                          "version": part["version"], "metric": metric, "n": part["items"],
                          "few_shot": part["few_shot"], **entry,
                          "chance": part["chance"] if metric.startswith("acc") else None,
                          "contexts_truncated": part["contexts_truncated"]})
    return found


def differences(pairs: Iterable[tuple[Candidate, Candidate]],
                measured: dict[str, dict[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """One row a pair, task and metric that can be paired; `measured` has each candidate's parts by its name."""
    found = []
    for first, second in pairs:
        for name, part in measured[first.name].items():
            one, other = part["per_item"], measured[second.name][name]["per_item"]
            assert one["hashes"] == other["hashes"], "both were asked the same items"
            for metric, items in one["metrics"].items():
                found.append({"first": first.name, "second": second.name, "task": name, "metric": metric,
                              **asdict(difference(items, other["metrics"][metric],
                                                  one["forms"].get(metric, "ratio")))})
    return found
