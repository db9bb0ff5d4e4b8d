"""Stage 6: measure the exported model: held-out bits per byte beside baselines, tasks, continuations of prompts.

What is loaded is the Hugging Face folder of the stage convert, so that the deliverable is what is measured. Every
rank holds the whole model and takes its share of the work; rank 0 writes.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __package__ in (None, ""):  # run as a script: find the packages, and shadow no library with a file beside this one
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from pipeline.entry import end_process, stage_main
from pipeline.errors import UserError
from pipeline.files import output_record, write_json, write_text
from pipeline.work import Work

if TYPE_CHECKING:
    from model.llama import Llama
    from pipeline.parallel.ranks import Ranks
    from pipeline.vocabulary.base import Vocabulary


def evaluate(work: Work) -> None:
    """Measure everything that is configured and commit results.json and results.md."""
    from pipeline.evaluation.tasks import go_offline
    go_offline()  # before anything imports the libraries that look for it
    from pipeline.parallel.ranks import start_ranks, stop_ranks
    from pipeline.parallel.topology import Topology

    ranks = start_ranks()
    try:
        Topology.gather(ranks, work)  # refuses ranks that do not run the same thing
        model, vocabulary = _load(work, ranks)
        clock = _Clock(work, ranks)
        heldout = clock.time("held-out text", measure_heldout, work, ranks, model)
        tasks = clock.time("tasks", measure_tasks, work, ranks, model, vocabulary) if work.config.evaluate.tasks else {}
        texts = clock.time("continuations", continue_prompts, work, ranks, model, vocabulary)
        if ranks.leads:
            _write(work, ranks, model, {"heldout": heldout, "tasks": tasks, "continuations": texts}, clock.seconds)
        ranks.barrier()  # the others end when the stage is committed
    finally:
        stop_ranks()


def _load(work: Work, ranks: Ranks) -> tuple[Llama, Vocabulary]:
    """The exported model on this rank's device, in evaluation mode, and its vocabulary."""
    import torch

    from model.llama import Llama
    from pipeline.formats.huggingface import read_folder
    from pipeline.vocabulary.kinds import load_vocabulary

    folder = work.input("convert")[0] / "hf"
    try:
        config, weights = read_folder(folder)
    except (ValueError, FileNotFoundError) as error:
        raise UserError(f"The exported model in {folder} cannot be read: {error}. Run the stage convert again with "
                        f"--force.") from error
    with torch.device("meta"):
        model = Llama(config)
    model.load_state_dict(weights, assign=True)
    model = model.to(ranks.device, getattr(torch, work.config.evaluate.dtype)).eval().requires_grad_(False)
    vocabulary = load_vocabulary(work.input("tokenizer")[0])
    assert config.vocab_size is not None
    if config.vocab_size < vocabulary.used:
        raise UserError(f"The model in {folder} knows {config.vocab_size} ids, but the vocabulary has "
                        f"{vocabulary.used}. They are not of the same run: run convert again with --force.")
    return model, vocabulary


def measure_heldout(work: Work, ranks: Ranks, model: Llama) -> dict[str, Any]:
    """Bits per byte and perplexity of each source and overall, with the baselines on the same bytes."""
    from pipeline.evaluation.baselines import baselines
    from pipeline.evaluation.bits_per_byte import HeldoutBatches, measure, overall
    from pipeline.evaluation.heldout import read_heldout, training_byte_counts
    from pipeline.evaluation.results import heldout_entry

    settings, shard, encode = work.config.evaluate, work.input("shard"), work.input("encode")
    sources = [source.name for source in work.config.shard.sources]
    read = {source: read_heldout(shard, encode, source, settings.heldout_tokens) for source in sources}
    read = {source: pair for source, pair in read.items() if pair[1]}
    if not read:
        raise UserError("There is no held-out text to measure on. Raise shard.heldout_share "
                        f"(now {work.config.shard.heldout_share}), or give more documents.")
    counts = sum(ranks.gather(training_byte_counts(*shard, int(settings.baseline_mb * 1e6), ranks.rank, ranks.world)))
    texts = {source: text for source, (_, text) in read.items()}
    if len(texts) > 1:
        texts[""] = b"".join(texts.values())  # all sources together; no source has an empty name
    names = list(texts)[ranks.rank::ranks.world]
    compared = {name: found for part in ranks.gather({name: baselines(texts[name], counts) for name in names})
                for name, found in part.items()}
    batches = HeldoutBatches({source: tokens for source, (tokens, _) in read.items()}, batch=settings.batch,
                             length=window_length(work, model), rank=ranks.rank, world=ranks.world)
    found = measure(lambda tokens, labels, documents, positions: model(
        tokens, labels, documents=documents, positions=positions, reduction="none"), batches, ranks.device)
    documents = {source: len(tokens.documents) for source, (tokens, _) in read.items()}
    whole = compared[""] if len(read) > 1 else next(iter(compared.values()))
    return {"sources": {source: heldout_entry(found[source], documents[source], compared[source]) for source in read},
            "overall": heldout_entry(overall(found), sum(documents.values()), whole),
            "without_heldout_text": [source for source in sources if source not in read]}


def window_length(work: Work, model: Llama) -> int:
    """Tokens per window."""
    return work.config.evaluate.sequence_length or model.config.context_length


def measure_tasks(work: Work, ranks: Ranks, model: Llama, vocabulary: Vocabulary) -> dict[str, Any]:
    """Results of the lm-evaluation-harness tasks that are configured."""
    from pipeline.evaluation.harness import HarnessModel
    from pipeline.evaluation.tasks import chosen_tasks, folders, run_tasks

    harness = HarnessModel(model, vocabulary, batch=work.config.evaluate.batch, rank=ranks.rank, world=ranks.world,
                           length=window_length(work, model))
    return run_tasks(harness, chosen_tasks(work.config), folders(work.config), work.config.evaluate.task_limit)


def continue_prompts(work: Work, ranks: Ranks, model: Llama, vocabulary: Vocabulary) -> list[dict[str, Any]]:
    """What the model writes after each prompt; the prompts are shared out over the ranks."""
    from model.generate import generate

    settings, context = work.config.evaluate, model.config.context_length
    written: dict[int, dict[str, Any]] = {}
    for number in range(ranks.rank, len(settings.prompts), ranks.world):
        prompt = settings.prompts[number]
        ids = [vocabulary.bos_id, *vocabulary.encode(prompt)]
        room = min(settings.prompt_tokens, context - len(ids))
        if room < 1:
            raise UserError(f"evaluate.prompts.{number} has {len(ids)} tokens, which leaves no room in the model's "
                            f"context of {context}. Shorten it.")
        new, = generate(model, [ids], room, temperature=settings.temperature, top_p=settings.top_p,
                        seed=settings.seed + number, stop_ids={vocabulary.eos_id})
        written[number] = {"prompt": prompt, "text": vocabulary.decode(new), "tokens": len(new),
                           "ended": len(new) < room}
    return [entry for _, entry in sorted(pair for part in ranks.gather(written) for pair in part.items())]


def _write(work: Work, ranks: Ranks, model: Llama, found: dict[str, Any], seconds: dict[str, float]) -> None:
    from pipeline.evaluation.results import as_json, as_markdown, say_results

    results = as_json(work.config, model.config, window_length(work, model), found)
    write_json(work.folder / "results.json", results)
    write_text(work.folder / "results.md", as_markdown(results))
    for line in say_results(results):
        work.say(line)
    outputs = [output_record(work.folder, work.folder / name) for name in ("results.json", "results.md")]
    total = results["heldout"]["overall"]
    work.commit(outputs, {"bits_per_byte": total["bits_per_byte"], "heldout_tokens": total["targets"],
                          "heldout_bytes": total["bytes"], "tasks": len(results["tasks"]), "ranks": ranks.world,
                          "device": str(ranks.device.type), "device_name": ranks.device_name, "seconds": seconds})


class _Clock:
    """How long each part took; told, and kept for the manifest, never in the results."""

    def __init__(self, work: Work, ranks: Ranks) -> None:
        self.work, self.ranks = work, ranks
        self.seconds: dict[str, float] = {}

    def time(self, name: str, function: Any, *arguments: Any) -> Any:
        began = time.monotonic()
        result = function(*arguments)
        self.seconds[name] = round(time.monotonic() - began, 3)
        if self.ranks.leads:
            self.work.say(f"{name}: {self.seconds[name]:.1f} s")
        return result


if __name__ == "__main__":
    end_process(stage_main("evaluate", evaluate))
