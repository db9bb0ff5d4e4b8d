"""Stage 6: measure the exported model: held-out bits per byte beside baselines, tasks, continuations of prompts.

What is loaded is the Hugging Face folder of the stage convert, so that the deliverable is what is measured. Every
rank holds the whole model, or its shard where that is too large, and takes its share of the work; rank 0 writes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __package__ in (None, ""):  # run as a script: find the packages, and shadow no library with a file beside this one
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from drover.pipeline.core.errors import UserError, listed
from drover.pipeline.core.files import output_record, sha256_json, write_json, write_text
from drover.pipeline.evaluation.tasks import chosen_tasks, go_offline

if TYPE_CHECKING:
    from drover.model.llama import Llama
    from drover.pipeline.contract.input_check import Expected, InputCheck
    from drover.pipeline.contract.stage_work import Work
    from drover.pipeline.data.chosen_documents import Chosen
    from drover.pipeline.evaluation.baselines import Baselines
    from drover.pipeline.evaluation.heldout import TextWanted
    from drover.pipeline.evaluation.kept import Kept
    from drover.pipeline.evaluation.placing import Placed
    from drover.pipeline.parallel.ranks import Ranks
    from drover.pipeline.tokenization.base import Tokenizer

TRAINING_BYTES = 1_000_000_000
"""Training text that the unigram byte baseline is fitted on, spread evenly over the shards."""


def evaluate(work: Work) -> None:
    """Measure everything that is configured and commit results.json and results.md."""
    go_offline()  # before anything imports the libraries that look for it
    from drover.pipeline.evaluation.kept import Kept
    from drover.pipeline.parallel.ranks import start_ranks, stop_ranks
    from drover.pipeline.training.rank_agreement import RankAgreement

    ranks = start_ranks(store=work.store, device=work.config.launch.device)
    try:
        RankAgreement.gather(ranks, work)  # refuses ranks that do not run the same thing
        inputs = work.check(_read_here(work, ranks))
        placed, tokenizer = _load(work, ranks)
        kept = Kept(work, ranks)
        with baselines_beside(work, ranks, kept) as (compared, of_what):
            heldout = kept.get(
                "held-out text", kept.deciding("encode convert", "heldout_tokens sequence_length dtype"),
                lambda: measure_heldout(work, ranks, placed))
            texts = kept.get(
                "continuations", kept.deciding("tokenizer convert", "prompts prompt_tokens temperature top_p dtype"),
                lambda: continue_prompts(work, ranks, placed, tokenizer))
            tasks = measure_tasks(work, ranks, kept, placed, tokenizer)
            if work.config.evaluate.contamination:
                look_for_items(work, ranks, kept, tasks)
            try:
                heldout["baselines"] = kept.get("baselines", of_what, compared.result)
            except UserError:  # on every rank: the text is another than was measured, or damaged, which is said first
                _prove_inputs(ranks, inputs, kept)
                raise
        _prove_inputs(ranks, inputs, kept)
        if ranks.leads:
            _write(work, ranks, placed, {"heldout": heldout, "tasks": tasks, "continuations": texts}, kept.seconds)
        ranks.barrier()  # the others end when the stage is committed
    finally:
        stop_ranks()


def _read_here(work: Work, ranks: Ranks) -> list[Expected]:
    """This rank's share of the files to be hashed: every file once, whoever reads it.

    Of the training text only beginnings are read, and each document there is compared with its own hash.
    """
    from drover.pipeline.data.stored.opening import heldout_file
    files = [*work.committed("convert", "tokenizer"), *work.outside(),
             *work.committed("shard", chosen=lambda record: record.get("split") == "heldout"),
             *work.committed("encode", chosen=heldout_file(work.config, work.input("encode")[0]))]
    return files[ranks.rank::ranks.world]


def _prove_inputs(ranks: Ranks, inputs: InputCheck, kept: Kept) -> None:
    """UserError, on every rank, if anything that was read is not what was committed; then nothing of it is kept."""
    inputs.wait()
    if problems := [problem for problem in ranks.gather(inputs.problem) if problem]:
        kept.forget()
        raise UserError(problems[0])


def _load(work: Work, ranks: Ranks) -> tuple[Placed, Tokenizer]:
    """The exported model, whole or sharded over ranks, and its tokenizer."""
    import torch

    from drover.pipeline.evaluation.placing import place
    from drover.pipeline.formats.weights import HuggingFaceWeights
    from drover.pipeline.tokenization.kinds import load_tokenizer

    folder, settings = work.input("convert")[0] / "hf", work.config.evaluate
    if ranks.world % (settings.dp_shard or 1):
        raise UserError(f"evaluate.dp_shard is {settings.dp_shard}, which does not divide the {ranks.world} "
                        f"rank{'s' * (ranks.world > 1)} of the stage. Give another, or null.")
    tokenizer = load_tokenizer(work.input("tokenizer")[0])
    try:
        with HuggingFaceWeights(folder) as weights:
            vocabulary = weights.config.vocab_size or 0
            if vocabulary < tokenizer.used:
                raise UserError(f"The model in {folder} knows {vocabulary} ids, but the vocabulary has "
                                f"{tokenizer.used}. They are not of the same run.")
            return place(weights, ranks, getattr(torch, settings.dtype), dp_shard=settings.dp_shard,
                         memory_gb=settings.memory_gb, say=work.say), tokenizer
    except UserError as error:
        raise UserError(f"{error} The stage convert made them: run it again with --force.") from error


@contextmanager
def baselines_beside(work: Work, ranks: Ranks, kept: Kept) -> Iterator[tuple[Baselines, dict[str, Any]]]:
    """The baselines, begun beside all that follows unless they were computed before, and all that decides them."""
    from drover.pipeline.evaluation.baselines import Baselines

    settings, shard = work.config.evaluate, work.input("shard")
    decides = kept.deciding("shard encode", "heldout_tokens compressed_mb")
    wanted = None
    if not kept.has("baselines", decides):
        wanted = ranks.by_leader(lambda: _wanted(work), share=False)
    with Baselines(ranks, *shard, wanted or {}, TRAINING_BYTES, int(settings.compressed_mb * 1e6)) as begun:
        yield begun, decides


def _wanted(work: Work) -> dict[str, TextWanted]:
    """By source, what to read of the text of the documents that are measured."""
    from drover.pipeline.evaluation.heldout import heldout_shards, wanted_text

    chosen, encode = _chosen(work), work.input("encode")
    shards = heldout_shards(work, chosen)
    return {source: wanted_text(work.input("shard"), encode[0], shards[source], source, of_source)
            for source, of_source in chosen.items()}


def _chosen(work: Work) -> dict[str, Chosen]:
    """By source, the held-out documents to measure on."""
    from drover.pipeline.data.chosen_documents import choose
    from drover.pipeline.evaluation.heldout import heldout_shards

    shards = heldout_shards(work, [source.name for source in work.config.shard.sources])
    found = {source: choose(of_source, work.config.evaluate.heldout_tokens) for source, of_source in shards.items()}
    if not any(map(len, found.values())):
        raise UserError("There is no held-out text to measure on. Raise shard.heldout_share "
                        f"(now {work.config.shard.heldout_share}), or give more documents.")
    return {source: chosen for source, chosen in found.items() if len(chosen)}


def measure_heldout(work: Work, ranks: Ranks, placed: Placed) -> dict[str, Any]:
    """By source what its held-out text costs, and of how much that is; see `results.heldout_results`. Every rank reads
    the documents of its own batches."""
    from drover.pipeline.data.chosen_documents import ChosenDocuments
    from drover.pipeline.evaluation.bits_per_byte import HeldoutBatches, HeldoutText, measure
    from drover.pipeline.evaluation.heldout import heldout_shards
    from drover.pipeline.evaluation.results import heldout_counts

    chosen = ranks.by_leader(lambda: _chosen(work))
    shards = heldout_shards(work, chosen)
    texts = {source: HeldoutText(ChosenDocuments(shards[source], documents), int(documents.text_bytes.sum()),
                                 documents.lengths.tolist())
             for source, documents in chosen.items()}
    batches = HeldoutBatches(texts, batch=work.config.evaluate.batch, length=window_length(work, placed.model),
                             rank=ranks.rank, world=ranks.world)
    found = measure(lambda tokens, labels, documents, positions: placed.model(
        tokens, labels, documents=documents, positions=positions, reduction="none"), batches, ranks.device,
        together=placed.together)
    return {"sources": {source: heldout_counts(found[source], documents) for source, documents in chosen.items()},
            "without_heldout_text": [source.name for source in work.config.shard.sources if source.name not in chosen]}


def window_length(work: Work, model: Llama) -> int:
    """Tokens per window."""
    return work.config.evaluate.sequence_length or model.config.context_length


def measure_tasks(work: Work, ranks: Ranks, kept: Kept, placed: Placed, tokenizer: Tokenizer) -> dict[str, Any]:
    """Results of the lm-evaluation-harness tasks that are configured, each kept as soon as it is there.

    Raises:
        UserError: tasks failed, each named with its reason; after all the others were measured.
    """
    tasks = chosen_tasks(work.config)
    if not tasks:
        return {}
    from drover.pipeline.evaluation.harness import HarnessModel
    from drover.pipeline.evaluation.running import TaskRunner

    settings, results, failed = work.config.evaluate, {}, []
    harness = HarnessModel(placed.model, tokenizer, batch=settings.batch, rank=ranks.rank, world=ranks.world,
                           length=window_length(work, placed.model), placed=placed)
    log = work.folder / "lm_eval.log"
    decide = kept.deciding("tokenizer convert", "sequence_length dtype task_limit bootstrap_iters")
    runner = TaskRunner(harness, settings.task_limit, settings.bootstrap_iters, log if ranks.leads else None)
    for task in tasks:
        files = {name: digest for name, digest in work.fingerprint["files"].items()
                 if name.startswith(f"{task.name}/")}
        try:
            results[task.name] = kept.get(f"task {task.name}", {**decide, "files": files},
                                          partial(runner.measure, task))
        except UserError as error:
            failed.append(str(error))
    if failed:
        raise UserError(f"{listed(failed)}\nWhat else was measured is kept ({', '.join(kept.seconds)}). Mend the task, "
                        f"or leave it out of evaluate.tasks, and run the stage again; {log} has the whole story.")
    return results


def look_for_items(work: Work, ranks: Ranks, kept: Kept, tasks: dict[str, Any]) -> None:
    """Put `contamination`, the scores of clean and dirty items, into each task's results."""
    from drover.pipeline.evaluation.contamination import clean_and_dirty, shares_in_training_text

    texts = [text for task in tasks.values() for text in task["per_item"]["texts"]]
    shares = kept.get("contamination", {**kept.deciding("shard"), "texts": sha256_json(texts)},
                      lambda: shares_in_training_text(texts, *work.input("shard"), ranks))
    start = 0
    for task in tasks.values():
        end = start + len(task["per_item"]["texts"])
        task["contamination"] = clean_and_dirty(task["per_item"], shares[start:end])
        start = end


def continue_prompts(work: Work, ranks: Ranks, placed: Placed, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """What the model writes after each prompt; the prompts are shared out over the ranks."""
    from drover.model.generate import generate

    settings, model = work.config.evaluate, placed.model
    asked = []
    for number, prompt in enumerate(settings.prompts):
        ids = [tokenizer.bos_id, *tokenizer.encode(prompt)]
        room = min(settings.prompt_tokens, model.config.context_length - len(ids))
        if room < 1:
            raise UserError(f"evaluate.prompts.{number} has {len(ids)} tokens, which leaves no room in the model's "
                            f"context of {model.config.context_length}. Shorten it.")
        asked.append((number, prompt, ids, room))
    written: dict[int, dict[str, Any]] = {}
    with placed.together:
        for number, prompt, ids, room in asked[ranks.rank::ranks.world]:
            new, = generate(model, [ids], room, temperature=settings.temperature, top_p=settings.top_p,
                            seed=number, stop_ids={tokenizer.eos_id})
            written[number] = {"prompt": prompt, "text": tokenizer.decode(new), "tokens": len(new),
                               "ended": len(new) < room}
    return [entry for _, entry in sorted(pair for part in ranks.gather(written) for pair in part.items())]


def _write(work: Work, ranks: Ranks, placed: Placed, found: dict[str, Any], seconds: dict[str, float]) -> None:
    from drover.pipeline.evaluation.results import as_json, as_markdown, say_results

    model = placed.model
    results = as_json(work.config, model.config, window_length(work, model), found)
    write_json(work.folder / "results.json", results)
    write_text(work.folder / "results.md", as_markdown(results))
    for line in say_results(results):
        work.say(line)
    outputs = [output_record(work.folder, work.folder / name) for name in ("results.json", "results.md")]
    total = results["heldout"]["overall"]
    work.commit(outputs, {"bits_per_byte": total["bits_per_byte"], "heldout_tokens": total["targets"],
                          "heldout_bytes": total["bytes"], "tasks": len(results["tasks"]), "ranks": ranks.world,
                          "dp_shard": placed.shards, "device": str(ranks.device.type),
                          "device_name": ranks.device_name, "seconds": seconds})


if __name__ == "__main__":
    from drover.pipeline.contract.entry import end_process, stage_main

    end_process(stage_main("evaluate", evaluate))
