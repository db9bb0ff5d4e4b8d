"""Stage 6, evaluate: measure the exported model. Bits per byte of validation text, with baselines; tasks; continuations
of prompts.

The stage loads the Hugging Face folder of the stage convert, so it measures what users get. Every rank holds the whole
model, or a shard of it if it is too large, and does a share of the work. Rank 0 writes.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __package__ in (None, ""):  # run as a script: find the packages, and let no file of this folder shadow a library
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from drover.pipeline.core.console import Watch, counted, watch_of
from drover.pipeline.core.errors import UserError, listed
from drover.pipeline.core.files import Ledger, output_record, sha256_json, write_json, write_text
from drover.pipeline.evaluation.selection import chosen_tasks, selected
from drover.pipeline.evaluation.tasks import go_offline

if TYPE_CHECKING:
    from drover.pipeline.contract.inputs import Expected, InputCheck
    from drover.pipeline.contract.stage_work import Work
    from drover.pipeline.data.token_shards import ShardTable
    from drover.pipeline.evaluation.items import TaskResult
    from drover.pipeline.evaluation.open_model import OpenedModel
    from drover.pipeline.parallel.ranks import Ranks


class Cached:
    """Results of the stage, each written when it is measured, under a hash of its inputs. A kill, a failed task or
    another list of tasks loses no finished result. All ranks call the methods together.

    Args:
        folder: of the results.

    Attributes:
        seconds: the time that each part took when it was measured.
    """

    def __init__(self, work: Work, ranks: Ranks, folder: Path) -> None:
        from drover.pipeline.contract.run import code_hashes
        from drover.pipeline.contract.stages import STAGES
        from drover.pipeline.evaluation.results import library_versions

        self.ledger = Ledger(folder)
        self.work = work
        self.ranks = ranks
        self.seconds: dict[str, float] = {}
        self._keys: dict[str, str] = {}
        self._made_by = [code_hashes(STAGES[work.name]), library_versions()]

    def get(self, name: str, stages: Sequence[str], settings: Sequence[str], measure: Callable[[], Any],
            **more: Any) -> Any:
        """The part `name`: from disk if its inputs are equal, else the result of `measure`, a JSON value.

        Its inputs are these stages, settings of the section evaluate, and `more`, as JSON; and the code and the
        libraries that measure. If those change, the part is measured again, so that the manifest names the code that
        made it.
        """
        record = self.ranks.by_leader(lambda: self.record(name, stages, settings, **more))
        how = "measured before, kept"
        if record is None:
            start = time.monotonic()
            value = json.loads(json.dumps(measure()))  # the same value whether cached or not
            record = {"seconds": round(time.monotonic() - start, 3), "value": value}
            how = f"{record['seconds']:.1f} s"
            if self.ranks.is_rank_zero:
                self.ledger.add(name, self._keys[name], record)
        self.seconds[name] = record["seconds"]
        if self.ranks.is_rank_zero:
            self.work.say(f"{name}: {how}")
        return record["value"]

    def record(self, name: str, stages: Sequence[str], settings: Sequence[str], **more: Any) -> Any:
        """What is on disk of a part, if its inputs are equal, else None. For rank 0."""
        inputs = {stage: self.work.fingerprint["inputs"][stage] for stage in stages}
        values = {setting: getattr(self.work.config.evaluate, setting) for setting in settings}
        self._keys[name] = key = sha256_json([inputs, values, more, self._made_by])
        return self.ledger.recorded({name: key}).get(name)

    def watch(self, name: str, unit: str = "batches") -> Watch:
        """Shows on rank 0 how much of the part `name` is measured."""
        return watch_of(self.work.name, name, sys.stdout, unit) if self.ranks.is_rank_zero else iter

    def forget(self) -> None:
        """Invalidate all parts of this start: its inputs did not match their digests."""
        for name in self.seconds if self.ranks.is_rank_zero else ():
            self.ledger.add(name, self._keys[name], None)


def evaluate(work: Work) -> None:
    """Measure everything that is configured and commit results.json."""
    go_offline()  # before anything imports the libraries that look for it
    from drover.pipeline.contract.workers import TASKS
    from drover.pipeline.data.token_shards import ShardTable
    from drover.pipeline.evaluation.aggregates import aggregated
    from drover.pipeline.evaluation.results import DOCUMENTS, as_json, figures, rounded, summary, validation_results
    from drover.pipeline.evaluation.validation import compare
    from drover.pipeline.parallel.ranks import start_ranks, stop_ranks
    from drover.pipeline.records.checkpoints import step_of
    from drover.pipeline.training.data import download_once_per_node
    from drover.pipeline.training.rank_agreement import RankAgreement
    from drover.pipeline.training.sinks import log_results

    settings = work.config.evaluate
    ranks = start_ranks(store=work.store, device=work.config.launch.device)
    background = ThreadPoolExecutor(1, "baselines")
    try:
        RankAgreement.gather(ranks, work)  # refuses ranks with different code or settings
        table = ShardTable.of(work.input("encode")[1].outputs)
        download_once_per_node(work, table, table.rows("validation").tolist(), ranks)
        inputs = work.check(_files_of_rank(work, ranks, table))
        opened = load(work, ranks, work.input("convert")[0] / "hf",
                      "The stage convert made them: run it again with --force.")
        length = settings.sequence_length or opened.config.context_length
        cached = Cached(work, ranks, work.folder / TASKS / "measured")
        of_baselines = ("baselines", ("shard", "encode"), ("validation_tokens", "compressed_mb"))
        due = ranks.is_rank_zero and cached.record(*of_baselines) is None
        baselines = background.submit(compare, work) if due else Future[Any]()  # without a result, which is not read
        validation = measure_text(work, ranks, cached, opened, length)
        continuations = cached.get("continuations", ("encode", "tokenizer", "convert"), (
            "prompts", "prompt_tokens", "temperature", "top_p", "dtype",
            *["validation_tokens"] * (settings.prompts is None)),  # they are then its first words
            lambda: continue_prompts(work, ranks, opened, cached.watch("continuations", "prompts")))
        tasks = measure_tasks(work, ranks, cached, opened, length, work.folder / "lm_eval.log")
        if settings.contamination:
            search_items(work, ranks, cached, tasks)
        try:
            compared = cached.get(*of_baselines, lambda: ranks.by_leader(baselines.result))
        except UserError:  # on every rank: the text has changed or is damaged; report a damaged input first
            _refuse_changed_inputs(ranks, inputs, cached)
            raise
        _refuse_changed_inputs(ranks, inputs, cached)
        if ranks.is_rank_zero:
            results = as_json(work.config, opened.config, validation_results(validation, compared), tasks,
                              continuations) | rounded(aggregated(selected(work.config), tasks))
            write_json(work.folder / "results.json", results)
            write_text(work.folder / "documents.jsonl", "".join(
                f"{json.dumps(document)}\n" for document in validation[DOCUMENTS]))
            for line in summary(results):
                work.say(line)
            total = results["validation"]["overall"]
            names = ("results.json", "documents.jsonl")
            work.commit([output_record(work.folder, work.folder / name) for name in names], {
                "bits_per_byte": total["bits_per_byte"], "validation_tokens": total["targets"],
                "validation_bytes": total["bytes"], "tasks": len(tasks), "ranks": ranks.world,
                "dp_shard": opened.placed.shards, "device": str(ranks.device.type), "device_name": ranks.device_name,
                "seconds": cached.seconds})
            step = step_of(Path(work.input("convert")[1].counts["checkpoint"]))
            log_results(work, {"step": step, **figures(results)}, after=step)
        ranks.barrier()  # the others end when the stage is committed
    finally:
        background.shutdown(wait=False)
        stop_ranks()


def _files_of_rank(work: Work, ranks: Ranks, table: ShardTable) -> list[Expected]:
    """This rank's share of the files to be hashed. Each file is hashed by one rank, even if several ranks read it;
    token shards that every node has downloaded, by every rank.

    Training text is not hashed: only beginnings of shards are read, and each document is compared with its own hash.
    """
    from drover.pipeline.data.remote_tokens import recorded_shards

    shared = [*work.committed("convert", "tokenizer"), *work.external_files(),
              *work.committed("shard", chosen=lambda record: record.get("split") == "validation")]
    tokens = recorded_shards(work, table, table.rows("validation").tolist())
    if work.config.train.tokens_from is None:
        return [*shared, *tokens][ranks.rank::ranks.world]
    return [*shared[ranks.rank::ranks.world], *tokens]


def _refuse_changed_inputs(ranks: Ranks, inputs: InputCheck, cached: Cached) -> None:
    """UserError, on every rank, if an input has changed since it was committed. Then no result is kept."""
    inputs.wait()
    if problems := [problem for problem in ranks.gather(inputs.problem) if problem]:
        cached.forget()
        raise UserError(problems[0])


def load(work: Work, ranks: Ranks, path: Path, advice: str) -> OpenedModel:
    """The model of the run at `path`, whole or sharded over ranks, and its tokenizer. advice: for weights that cannot
    be read."""
    import torch

    from drover.pipeline.evaluation.open_model import open_model
    from drover.pipeline.tokenization.tokenizer import load_tokenizer

    settings = work.config.evaluate
    if ranks.world % (settings.dp_shard or 1):
        raise UserError(f"evaluate.dp_shard is {settings.dp_shard}, which does not divide the "
                        f"{counted(ranks.world, 'rank')} of the stage. Give another, or null.")
    tokenizer = load_tokenizer(work.input("tokenizer")[0])
    try:
        return open_model(path, ranks.device, getattr(torch, settings.dtype), tokenizer=tokenizer, ranks=ranks,
                          dp_shard=settings.dp_shard, say=work.say)
    except UserError as error:
        raise UserError(f"{error} {advice}") from error


def measure_text(work: Work, ranks: Ranks, cached: Cached, opened: OpenedModel, length: int) -> dict[str, Any]:
    """The loss on validation text. length: tokens per window."""
    from drover.pipeline.evaluation.validation import measure_validation

    return cached.get("validation text", ("encode", "convert"), ("validation_tokens", "sequence_length", "dtype"),
                      lambda: measure_validation(work, ranks, opened, length, cached.watch("validation text")))


def measure_tasks(work: Work, ranks: Ranks, cached: Cached, opened: OpenedModel, length: int, log: Path
                  ) -> dict[str, TaskResult]:
    """Results of the configured lm-evaluation-harness tasks. Each result is kept as soon as it is measured.

    log: the harness's output and messages are appended to this file.

    Raises:
        UserError: tasks failed; it names each of them with the reason. All other tasks are measured before.
    """
    tasks = chosen_tasks(work.config)
    if not tasks:
        return {}
    from drover.pipeline.evaluation.harness import HarnessModel, measure_task

    settings = work.config.evaluate
    results: dict[str, TaskResult] = {}
    failed = list[str]()
    model = HarnessModel(opened, batch=settings.batch, length=length, ranks=ranks)
    for task in tasks:
        files = {name: digest for name, digest in work.fingerprint["files"].items()
                 if name.startswith(f"{task.name}/")}
        model.watch = cached.watch(name := f"task {task.name}")
        try:
            results[task.name] = cached.get(
                name, ("tokenizer", "convert"), (
                    "sequence_length", "dtype", "task_limit", "bootstrap_iters"),
                partial(measure_task, model, task, settings.task_limit, settings.bootstrap_iters, log), files=files,
                overrides=task.overrides)
        except UserError as error:
            failed.append(str(error))
    if failed:
        raise UserError(f"{listed(failed)}\nAll other results are kept ({', '.join(cached.seconds)}). Correct the "
                        f"task, or leave it out of evaluate.tasks, and give the command again; {log} has the details.")
    return results


def search_items(work: Work, ranks: Ranks, cached: Cached, tasks: Mapping[str, TaskResult]) -> None:
    """Put `contamination`, the scores of clean and dirty items, into each task's results."""
    from drover.pipeline.evaluation.contamination import clean_and_dirty, shares_in_training_text
    from drover.pipeline.tokenization.texts import shard_texts

    texts = [text for task in tasks.values() for text in task["per_item"]["texts"]]
    made_by = ("shard", *["encode"] * bool(work.config.encode.sources))
    shares = iter(cached.get("contamination", made_by, (), lambda: shares_in_training_text(
        texts, shard_texts(work.run, "train"), ranks, cached.watch("contamination", "shards")), texts=texts))
    for task in tasks.values():
        found = [next(shares) for _ in task["per_item"]["texts"]]
        count = len(task["per_item"]["hashes"])
        task["contamination"] = clean_and_dirty(task["per_item"], [
            max((share for share in found[number::count] if share is not None), default=None)
            for number in range(count)])


def continue_prompts(work: Work, ranks: Ranks, opened: OpenedModel, watch: Watch) -> list[dict[str, Any]]:
    """The model's continuation of each prompt. Each rank continues a share of the prompts."""
    from drover.model.generation.stream import generate
    from drover.pipeline.data.remote_tokens import shards_of
    from drover.pipeline.data.token_shards import ChosenDocuments
    from drover.pipeline.evaluation.open_model import eos_ids, named_if_nan, prompt_ids
    from drover.pipeline.evaluation.validation import chosen_documents

    settings = work.config.evaluate
    context = opened.config.context_length

    def beginnings() -> list[str]:
        shards = shards_of(work, "validation")
        return opened.tokenizer.beginnings([ChosenDocuments(shards[source], chosen)
                                            for source, chosen in chosen_documents(work).items()])
    texts = ranks.by_leader(beginnings) if settings.prompts is None else settings.prompts
    most = context - settings.prompt_tokens if settings.prompts is None else None  # forty characters may be 160 bytes
    prompts = [prompt_ids(opened, text)[:most] for text in texts]
    for number, ids in enumerate(prompts):
        if len(ids) >= context:
            raise UserError(f"evaluate.prompts.{number} has {len(ids)} tokens, which leaves no room in the model's "
                            f"context of {context}. Shorten it.")

    def write(number: int) -> dict[str, Any]:
        room = min(settings.prompt_tokens, context - len(prompts[number]))
        with named_if_nan(opened):
            new, = generate(opened.model, [prompts[number]], room, temperature=settings.temperature,
                            top_p=settings.top_p, seed=number, stop_ids=eos_ids(opened))
        return {"prompt": texts[number], "text": opened.tokenizer.decode(new), "tokens": len(new),
                "ended": len(new) < room}

    return opened.placed.divide(ranks, range(len(prompts)), write, watch)


if __name__ == "__main__":
    from drover.pipeline.contract.entry import end_process, stage_main

    end_process(stage_main("evaluate", evaluate))
