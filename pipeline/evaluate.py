"""Stage 6, evaluate: measure the exported model. Bits per byte of validation text, with baselines; tasks; continuations
of prompts.

The stage loads the Hugging Face folder of the stage convert, so it measures what users get. Every rank holds the whole
model, or a shard of it if it is too large, and does a share of the work. Rank 0 writes.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __package__ in (None, ""):  # run as a script: find the packages, and let no file of this folder shadow a library
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from drover.pipeline.core.console import counted
from drover.pipeline.core.errors import UserError, listed
from drover.pipeline.core.files import output_record, sha256_json, write_json
from drover.pipeline.evaluation.tasks import chosen_tasks, go_offline

if TYPE_CHECKING:
    from drover.pipeline.contract.input_check import Expected, InputCheck
    from drover.pipeline.contract.stage_work import Work
    from drover.pipeline.data.shard_table import ShardTable
    from drover.pipeline.evaluation.kept import Kept
    from drover.pipeline.evaluation.open_model import OpenedModel
    from drover.pipeline.parallel.ranks import Ranks

TRAINING_BYTES = 1_000_000_000
"""Bytes of training text on which the unigram baseline is fitted, spread evenly over the shards."""


def evaluate(work: Work) -> None:
    """Measure everything that is configured and commit results.json."""
    go_offline()  # before anything imports the libraries that look for it
    from drover.pipeline.contract.run import code_hashes
    from drover.pipeline.contract.stages import STAGES
    from drover.pipeline.contract.tasks import UNITS
    from drover.pipeline.data.shard_table import ShardTable
    from drover.pipeline.evaluation.baselines import Baselines
    from drover.pipeline.evaluation.kept import Kept
    from drover.pipeline.evaluation.validation import wanted_texts
    from drover.pipeline.parallel.ranks import start_ranks, stop_ranks
    from drover.pipeline.training.data.opening import download_once_per_node
    from drover.pipeline.training.rank_agreement import RankAgreement

    ranks = start_ranks(store=work.store, device=work.config.launch.device)
    try:
        RankAgreement.gather(ranks, work)  # refuses ranks with different code or settings
        table = ShardTable.of(work.input("encode")[1].outputs)
        download_once_per_node(work, table, table.rows("validation").tolist(), ranks)
        inputs = work.check(_read_here(work, ranks, table))
        opened = _load(work, ranks)
        kept = Kept(work.folder / UNITS / "measured", code_hashes(STAGES[work.name]), ranks, work.say)
        of_what = _deciding(work, "shard encode", "validation_tokens compressed_mb")
        # The baselines are computed in the background, unless earlier results are kept.
        wanted = None if kept.has("baselines", of_what) else ranks.by_leader(lambda: wanted_texts(work), share=False)
        with Baselines(ranks, *work.input("shard"), wanted or {}, TRAINING_BYTES,
                       int(work.config.evaluate.compressed_mb * 1e6)) as compared:
            validation = kept.get(
                "validation text", _deciding(work, "encode convert", "validation_tokens sequence_length dtype"),
                lambda: measure_validation(work, ranks, opened))
            texts = kept.get(
                "continuations", _deciding(work, "tokenizer convert", "prompts prompt_tokens temperature top_p dtype"),
                lambda: continue_prompts(work, ranks, opened))
            tasks = measure_tasks(work, ranks, kept, opened)
            if work.config.evaluate.contamination:
                look_for_items(work, ranks, kept, tasks)
            try:
                validation["baselines"] = kept.get("baselines", of_what, compared.result)
            except UserError:  # on every rank: the text has changed or is damaged; report a damaged input first
                _prove_inputs(ranks, inputs, kept)
                raise
        _prove_inputs(ranks, inputs, kept)
        if ranks.leads:
            found = {"validation": validation, "tasks": tasks, "continuations": texts}
            _write(work, ranks, opened, found, kept.seconds)
        ranks.barrier()  # the others end when the stage is committed
    finally:
        stop_ranks()


def _deciding(work: Work, stages: str, settings: str = "") -> dict[str, Any]:
    """The values that decide a result: digests of the stages that it needs, and settings of the section evaluate."""
    return {**{stage: work.fingerprint["inputs"][stage] for stage in stages.split()},
            **{name: getattr(work.config.evaluate, name) for name in settings.split()}}


def _read_here(work: Work, ranks: Ranks, table: ShardTable) -> list[Expected]:
    """This rank's share of the files to be hashed. Each file is hashed by one rank, even if several ranks read it;
    token shards that every node has downloaded, by every rank.

    Training text is not hashed: only beginnings of shards are read, and each document is compared with its own hash.
    """
    from drover.pipeline.data.remote_tokens import recorded_shards

    shared = [*work.committed("convert", "tokenizer"), *work.outside(),
              *work.committed("shard", chosen=lambda record: record.get("split") == "validation")]
    tokens = recorded_shards(work, table, table.rows("validation").tolist())
    if work.config.train.tokens_from is None:
        return [*shared, *tokens][ranks.rank::ranks.world]
    return [*shared[ranks.rank::ranks.world], *tokens]


def _prove_inputs(ranks: Ranks, inputs: InputCheck, kept: Kept) -> None:
    """UserError, on every rank, if an input has changed since it was committed. Then no result is kept."""
    inputs.wait()
    if problems := [problem for problem in ranks.gather(inputs.problem) if problem]:
        kept.forget()
        raise UserError(problems[0])


def _load(work: Work, ranks: Ranks) -> OpenedModel:
    """The exported model, whole or sharded over ranks, and its tokenizer."""
    import torch

    from drover.pipeline.evaluation.open_model import open_model
    from drover.pipeline.tokenization.kinds import load_tokenizer

    folder, settings = work.input("convert")[0] / "hf", work.config.evaluate
    if ranks.world % (settings.dp_shard or 1):
        raise UserError(f"evaluate.dp_shard is {settings.dp_shard}, which does not divide the "
                        f"{counted(ranks.world, 'rank')} of the stage. Give another, or null.")
    tokenizer = load_tokenizer(work.input("tokenizer")[0])
    try:
        return open_model(folder, ranks.device, getattr(torch, settings.dtype), tokenizer=tokenizer, ranks=ranks,
                          dp_shard=settings.dp_shard, memory_gb=settings.memory_gb, say=work.say)
    except UserError as error:
        raise UserError(f"{error} The stage convert made them: run it again with --force.") from error


def measure_validation(work: Work, ranks: Ranks, opened: OpenedModel) -> dict[str, Any]:
    """The loss on each source's validation text, and how much text was measured; see `results.validation_results`.
    Every rank reads the documents of its own batches."""
    from drover.pipeline.data.chosen_documents import ChosenDocuments
    from drover.pipeline.data.remote_tokens import shards_of
    from drover.pipeline.evaluation.bits_per_byte import ValidationBatches, ValidationText, measure
    from drover.pipeline.evaluation.validation import chosen_documents

    chosen = ranks.by_leader(lambda: chosen_documents(work))
    shards = shards_of(work, "validation")
    texts = {source: ValidationText(ChosenDocuments(shards[source], documents), int(documents.text_bytes.sum()),
                                 documents.lengths.tolist())
             for source, documents in chosen.items()}
    batches = ValidationBatches(texts, batch=work.config.evaluate.batch, length=window_length(work, opened),
                             rank=ranks.rank, world=ranks.world)
    found = measure(lambda tokens, labels, documents, positions: opened.model(
        tokens, labels, documents=documents, positions=positions, reduction="none"), batches, ranks.device,
        together=opened.placed.together)
    return {"sources": {source: {
        "nats": found[source].nats, "targets": found[source].targets, "bytes": found[source].text_bytes,
        "documents": len(documents), "tokens": int(documents.lengths.sum()), "of_documents": documents.of_documents,
        "of_tokens": documents.of_tokens} for source, documents in chosen.items()},
        "without_validation_text": [source.name for source in work.config.shard.sources if source.name not in chosen]}


def window_length(work: Work, opened: OpenedModel) -> int:
    """Tokens per window."""
    return work.config.evaluate.sequence_length or opened.config.context_length


def measure_tasks(work: Work, ranks: Ranks, kept: Kept, opened: OpenedModel) -> dict[str, Any]:
    """Results of the configured lm-evaluation-harness tasks. Each result is kept as soon as it is measured.

    Raises:
        UserError: tasks failed; it names each of them with the reason. All other tasks are measured before.
    """
    tasks = chosen_tasks(work.config)
    if not tasks:
        return {}
    from drover.pipeline.evaluation.harness import HarnessModel
    from drover.pipeline.evaluation.prompts import eos_ids
    from drover.pipeline.evaluation.running import measure_task

    settings, results, failed, log = work.config.evaluate, {}, [], work.folder / "lm_eval.log"
    harness = HarnessModel(opened.placed, opened.tokenizer, batch=settings.batch, length=window_length(work, opened),
                           ranks=ranks, ends=eos_ids(opened))
    decide = _deciding(work, "tokenizer convert", "sequence_length dtype task_limit bootstrap_iters")
    for task in tasks:
        files = {name: digest for name, digest in work.fingerprint["files"].items()
                 if name.startswith(f"{task.name}/")}
        try:
            results[task.name] = kept.get(
                f"task {task.name}", {**decide, "files": files},
                partial(measure_task, harness, task, settings.task_limit, settings.bootstrap_iters, log))
        except UserError as error:
            failed.append(str(error))
    if failed:
        raise UserError(f"{listed(failed)}\nAll other results are kept ({', '.join(kept.seconds)}). Correct the task, "
                        f"or leave it out of evaluate.tasks, and run the stage again; {log} has the details.")
    return results


def look_for_items(work: Work, ranks: Ranks, kept: Kept, tasks: dict[str, Any]) -> None:
    """Put `contamination`, the scores of clean and dirty items, into each task's results."""
    from drover.pipeline.evaluation.contamination import clean_and_dirty, shares_in_training_text

    texts = [text for task in tasks.values() for text in task["per_item"]["texts"]]
    shares = kept.get("contamination", {**_deciding(work, "shard"), "texts": sha256_json(texts)},
                      lambda: shares_in_training_text(texts, *work.input("shard"), ranks))
    start = 0
    for task in tasks.values():
        end = start + len(task["per_item"]["texts"])
        task["contamination"] = clean_and_dirty(task["per_item"], shares[start:end])
        start = end


def continue_prompts(work: Work, ranks: Ranks, opened: OpenedModel) -> list[dict[str, Any]]:
    """The model's continuation of each prompt. Each rank continues a share of the prompts."""
    from drover.model.generate import generate
    from drover.pipeline.evaluation.open_model import named_if_nan
    from drover.pipeline.evaluation.prompts import eos_ids, prompt_ids

    settings, context = work.config.evaluate, opened.config.context_length
    asked = [prompt_ids(opened, prompt) for prompt in settings.prompts]
    for number, ids in enumerate(asked):
        if len(ids) >= context:
            raise UserError(f"evaluate.prompts.{number} has {len(ids)} tokens, which leaves no room in the model's "
                            f"context of {context}. Shorten it.")
    written: dict[int, Any] = {}
    with opened.placed.together:
        for number in range(ranks.rank, len(asked), ranks.world):
            room = min(settings.prompt_tokens, context - len(asked[number]))
            try:
                with named_if_nan(opened):
                    new, = generate(opened.model, [asked[number]], room, temperature=settings.temperature,
                                    top_p=settings.top_p, seed=number, stop_ids=eos_ids(opened))
            except UserError as error:  # raised on every rank below
                written[number] = error
                continue
            written[number] = {"prompt": settings.prompts[number], "text": opened.tokenizer.decode(new),
                               "tokens": len(new), "ended": len(new) < room}
    entries = [entry for _, entry in sorted(pair for part in ranks.gather(written) for pair in part.items())]
    for entry in entries:
        if isinstance(entry, UserError):
            raise entry
    return entries


def _write(work: Work, ranks: Ranks, opened: OpenedModel, found: dict[str, Any], seconds: dict[str, float]) -> None:
    from drover.pipeline.evaluation.results import as_json, say_results

    results = as_json(work.config, opened.config, window_length(work, opened), found)
    said = list(say_results(results))
    write_json(work.folder / "results.json", results)
    for line in said:
        work.say(line)
    outputs = [output_record(work.folder, work.folder / "results.json")]
    total = results["validation"]["overall"]
    work.commit(outputs, {"bits_per_byte": total["bits_per_byte"], "validation_tokens": total["targets"],
                          "validation_bytes": total["bytes"], "tasks": len(results["tasks"]), "ranks": ranks.world,
                          "dp_shard": opened.placed.shards, "device": str(ranks.device.type),
                          "device_name": ranks.device_name, "seconds": seconds})


if __name__ == "__main__":
    from drover.pipeline.contract.entry import end_process, stage_main

    end_process(stage_main("evaluate", evaluate))
