"""Several models measured on the same items: rows of scores, and the differences between pairs of models."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drover.pipeline.contract.run import run_in
from drover.pipeline.errors import UserError
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
        places: folders that tasks are loaded from.
        limit: items per task; None: all.
        dtype: arithmetic, float32 or bfloat16.
        batch: sequences per forward pass.
        length: tokens per window; None: each model's context.
        bootstrap_iters: draws for standard errors without a formula.
        heldout: the run whose held-out documents are measured; None: none.
        documents: held-out documents per source; None: all.
    """

    tasks: Sequence[TaskFile]
    places: list[Path]
    limit: int | None = None
    dtype: str = "float32"
    batch: int = 16
    length: int | None = None
    bootstrap_iters: int = 100_000
    heldout: Run | None = None
    documents: int | None = None

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


class Measuring:
    """One candidate's parts; the model is opened when the first is measured that was not kept.

    Args:
        candidate, conditions: what is measured, and how.
        ranks: share the requests.
        log: for what the harness says.
    """

    def __init__(self, candidate: Candidate, conditions: Conditions, ranks: Ranks, log: Path) -> None:
        self.candidate, self.conditions, self.ranks, self.log = candidate, conditions, ranks, log

    @cached_property
    def harness(self) -> HarnessModel:
        """The opened model; UserError for windows that it cannot take."""
        import torch

        from drover.pipeline.evaluation.harness import HarnessModel
        from drover.pipeline.evaluation.open_model import open_model

        opened = open_model(self.candidate.path, self.ranks.device, getattr(torch, self.conditions.dtype))
        if self.conditions.length is not None and self.conditions.length > opened.config.context_length:
            raise UserError(f"Windows of {self.conditions.length} tokens are more than the context of "
                            f"{self.candidate.name}, {opened.config.context_length}.")
        return HarnessModel(opened.model, opened.tokenizer, batch=self.conditions.batch, rank=self.ranks.rank,
                            world=self.ranks.world, length=self.conditions.length)

    def parts(self, kept: KeptParts) -> dict[str, dict[str, Any]]:
        """By task, and `heldout` where it is asked for: what `TaskRunner.measure` tells, `per_item` included."""
        identity = weights_identity(self.candidate.path)
        own = {"weights": identity, "dtype": self.conditions.dtype, "length": self.conditions.length}
        found = {}
        for task in self.conditions.tasks:
            decides = {**own, "task": task_identity(task), "limit": self.conditions.limit,
                       "bootstrap_iters": self.conditions.bootstrap_iters}
            found[task.name] = kept.get(f"{self.candidate.name} {task.name}", decides, partial(self._task, task))
        if self.conditions.heldout is not None:
            decides = {**own, "text": self.conditions.heldout.finished("shard").digest,
                       "documents": self.conditions.documents}
            found[self.heldout_name] = kept.get(f"{self.candidate.name} held-out text", decides, self._heldout)
        return found

    @property
    def heldout_name(self) -> str:
        """The row of held-out text."""
        assert self.conditions.heldout is not None
        return f"held-out text of {self.conditions.heldout.config.name}"

    def _task(self, task: TaskFile) -> dict[str, Any]:
        from drover.pipeline.evaluation.running import TaskRunner

        with TaskRunner(self.harness, self.conditions.places, self.conditions.limit, self.conditions.bootstrap_iters,
                        self.log if self.ranks.leads else None) as runner:
            return runner.measure(task)

    def _heldout(self) -> dict[str, Any]:
        """Bits per byte over the documents, as the stage evaluate has it. Each model reads the text by its own
        tokenizer; the bytes are the same."""
        texts, harness = self.conditions.heldout_texts, self.harness
        ids = [[harness.prefix_token_id, *harness.tok_encode(text), harness.eot_token_id] for text in texts.values()]
        items = [(-value / math.log(2), float(len(text.encode())))
                 for value, text in zip(harness.documents(ids), texts.values(), strict=True)]
        value, stderr = score(items)
        assert self.conditions.heldout is not None
        return {"metrics": {BITS: {"value": value, "stderr": stderr}}, "items": len(items), "few_shot": 0,
                "version": self.conditions.heldout.finished("shard").digest[:12], "chance": None,
                "contexts_truncated": 0, "per_item": {"hashes": list(texts), "forms": {}, "metrics": {BITS: items}}}


def deliverable(path: Path) -> Path:
    """Of a run's folder what its stage convert exported, which is what its stage evaluate measures; before that is
    done, and of any other folder, `path`, of which `open_model` takes a run's newest checkpoint."""
    run = run_in(path) if (path / "config.yaml").is_file() else None
    return run.stage_folder("convert") / "hf" if run is not None and run.manifest("convert") is not None else path


def weights_identity(path: Path) -> list[list[Any]]:
    """Names, sizes and times of the files of a model, at any depth: another of them is measured again."""
    from drover.pipeline.formats.weights import open_weights

    with open_weights(path) as weights:
        folder = weights.path
    return [[file.relative_to(folder).as_posix(), file.stat().st_size, file.stat().st_mtime_ns]
            for file in sorted(folder.rglob("*")) if file.is_file()]


def task_identity(task: TaskFile) -> list[list[str]]:
    """Names and hashes of all files that decide a task."""
    from drover.pipeline.files import sha256_file

    return [[name, sha256_file(path)] for name, path in task.inputs()]


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
