"""Stage 2, tokenizer: train a tokenizer or take a ready one, export it for Hugging Face, verify both, and report."""

from __future__ import annotations

import sys
from pathlib import Path

if __package__ in (None, ""):  # run as a script: find the packages, and let no file of this folder shadow a library
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, TypedDict

from drover.pipeline.contract.workers import Task
from drover.pipeline.core.console import counted
from drover.pipeline.core.files import Record, copy_file, output_record, write_json
from drover.pipeline.data.text_shards import (
    TextRecord,
    beginnings,
    beginnings_by_source,
    by_source,
    read_texts,
    shard_name,
    shard_records,
    text_bytes,
)
from drover.pipeline.tokenization.checking import COUNT, ShardCheck, check_shard, compared, from_bitmap, refuse_failures
from drover.pipeline.tokenization.conversion import (
    open_tokenizer,
    refuse_inexact,
    refuse_other_surroundings,
    write_characters,
    write_hugging_face,
)
from drover.pipeline.tokenization.files import (
    CODE,
    FILES,
    copy_hugging_face,
    files_beside,
    names_code,
    place,
    placed,
    ready_file,
    write_record,
)
from drover.pipeline.tokenization.reporting import described, summed
from drover.pipeline.tokenization.tokenizer import Tokenizer, load_tokenizer, loses_marks
from drover.pipeline.tokenization.training import (
    Sample,
    sampled,
    train_bpe,
    train_sentencepiece,
    training_shards,
)

if TYPE_CHECKING:
    from drover.pipeline.config.data import TokenizerConfig
    from drover.pipeline.contract.stage_work import Work

BATCH_BYTES = 1_000_000
"""Bytes of text that are read at once for the sample."""
LOOK_BYTES = 3_000_000
"""Bytes of training text (beginnings of shards) that are checked in addition to the validation text. They also show
which pieces occur."""


def make_tokenizer(work: Work) -> None:
    """Make one tokenizer from the training split, or take a ready one, and verify it on validation documents."""
    shards, manifest = work.input("shard")
    work.check(work.external_files())
    train, validation = (shard_records(manifest, split) for split in ("train", "validation"))
    made = _made(work, shards, train)
    tokenizer = load_tokenizer(work.folder)

    checked = beginnings_by_source(validation, work.config.tokenizer.check_mb * 1e6)
    tasks = [Task(shard_name(record).replace("/", "-"), ShardCheck(
        shards=place(shards, work.folder), record=record, sha256=tokenizer.sha256, limit=limit))
             for record, limit in (*checked, *beginnings(train, LOOK_BYTES))]
    checks = work.run_pass("check", tasks, check_shard, "shards")
    tally = summed(check["tally"] for check in checks)
    refuse_failures(tally, [failure for check in checks for failure in check["failures"]])

    tallies = {source: summed(check["tally"] for check, (record, _) in zip(checks, checked, strict=False)
                              if record["source"] == source) for source in by_source(validation)}
    seen = set().union(*(from_bitmap(check["seen"]) for check in checks))
    marks = manifest.counts.get("documents_with_u2581", 0) if loses_marks(tokenizer) else 0
    report = described(tokenizer, tallies, summed(check["tally"] for check in checks[len(checked):]), seen, marks,
                       sum(record["docs"] for record in validation))
    write_json(work.folder / "report.json", report)
    speed = tally["text_bytes"] / 1e6 / max(1e-9, sum(check["encode_s"] for check in checks))
    if marks:
        of = manifest.counts["train"] + manifest.counts["validation"]
        work.say(f"{marks:,} of {of:,} documents have the character U+2581 (\u2581), sentencepiece's own sign "
                 f"for a space: it is decoded as a space. If this matters, use tokenizer.kind tiktoken, huggingface or "
                 f"byte")
    _print_results(work, tokenizer, report, speed)
    # Speeds are only in the counts: a file with a speed would have another hash after each run.
    counts = {"kind": tokenizer.kind, "vocab_size": tokenizer.size, "used": tokenizer.used,
              "bos_id": tokenizer.bos_id, "eos_id": tokenizer.eos_id, "sha256": tokenizer.sha256,
              "trained_on": made["sample"], "validation": report["total"], "documents_with_u2581_as_space": marks,
              "unused_pieces": report["unused_pieces"], "encode_mb_per_s": round(speed, 3)}
    if work.config.encode.encoder != "reference":
        counts[COUNT] = compared(tokenizer, work.folder, shards, validation)
    work.commit([*made["outputs"], output_record(work.folder, work.folder / "report.json")], counts)


class VocabularyTask(TypedDict):
    """What a vocabulary is made of: the settings; and to train one the shards, the share of the text to take by source,
    and how many shards there are in all."""

    settings: object
    shards: str
    records: list[TextRecord]
    shares: dict[str, float]
    of_shards: int


def _made(work: Work, shards: Path, train: list[TextRecord]) -> Record:
    settings = work.config.tokenizer
    records, shares = (train, {}) if settings.kind == "char" else training_shards(train, settings.train_mb * 1e6)
    if settings.path is not None:
        work.say(f"taking {settings.path}")
        records = []
    else:
        work.say(f"making a {settings.kind} vocabulary from {text_bytes(records) / 1e6:.1f} MB of training text in "
                 f"{len(records)} of {counted(len(train), 'shard')}")
    [made] = work.run_pass("make", [Task("vocabulary", VocabularyTask(
        settings=settings.model_dump(mode="json"), shards=place(shards, work.folder), records=records, shares=shares,
        of_shards=len(train)))], make, "vocabulary")
    for note in made["notes"]:
        work.say(note)
    return made


def make(folder: Path, payload: VocabularyTask) -> Record:
    """Task: the vocabulary's file, its description and its Hugging Face export."""
    from drover.pipeline.config.data import TokenizerConfig

    settings, sample, notes = TokenizerConfig.model_validate(payload["settings"]), Sample(), list[str]()
    path = folder / name if (name := FILES[settings.kind]) else None
    ready = ready_file(settings) if settings.path is not None else None
    if path is not None and ready is None:
        records = payload["records"]
        sample = Sample(shards=len(records), of_shards=payload["of_shards"], read_bytes=text_bytes(records))
        _train(settings, placed(folder, payload["shards"]), payload, path, sample)
        if sample.nul_characters:
            notes = [f"{sample.nul_characters} NUL characters were left out of the training text"]
    tokenizer = open_tokenizer(settings.kind, ready or path)  # a file next to a ready one may name its BOS and EOS
    if ready and path:
        copy_file(ready, path)
    if ready and settings.kind == "huggingface":
        refuse_other_surroundings(ready, tokenizer)
        beside = files_beside(ready)
        notes = [f"{file} names code ({CODE}), which is left out: it is neither run nor exported"
                 for file in beside if names_code(file)]
        # Without settings of its own, transformers does not know which tokens are BOS and EOS.
        exported = (copy_hugging_face(ready, beside, folder / "hf") if beside
                    else write_hugging_face(tokenizer, folder / "hf"))
    else:
        refuse_inexact(tokenizer, path)
        exported = write_hugging_face(tokenizer, folder / "hf")
    files = [*([path] if path else []), write_record(folder, tokenizer), *exported]
    return {"outputs": [output_record(folder, file) for file in files], "sample": asdict(sample), "notes": notes}


def _train(settings: TokenizerConfig, shards: Path, payload: VocabularyTask, path: Path, sample: Sample) -> None:
    """Train on the documents of the shards, and count them in the sample."""
    def documents(record: TextRecord) -> Iterator[tuple[str, str]]:
        for batch in read_texts(shards, record, BATCH_BYTES):
            yield from zip(batch.keys, batch.texts, strict=True)
    records = payload["records"]
    if settings.kind == "char":
        write_characters(path, (text for record in records for _, text in documents(record)))
        return
    chunks = (chunk for record in records for chunk in sampled(
        documents(record), payload["shares"][record["source"]], sample, settings.document_characters))
    train = train_bpe if settings.kind == "bpe" else train_sentencepiece
    train(chunks, settings, path)


def _print_results(work: Work, tokenizer: Tokenizer, report: Record, speed: float) -> None:
    total = report["total"]
    seen = (f", {total['bytes_per_token'] or 0:.3f} bytes per token, {total['fallback_share'] or 0:.3%} byte fallback, "
            f"{speed:.1f} MB/s per process") if speed else "; there is no text to check it on"
    work.say(f"{tokenizer.kind}: {tokenizer.size:,} ids{seen}")
    bos, eos = tokenizer.bounds
    work.say(f"around each document: {bos} ({tokenizer.bos_id}) before it, {eos} ({tokenizer.eos_id}) after it")
    if not speed:
        return
    notable = (("literal_marks", "but for U+2581, which came back as a space"),
               ("cut_documents", "checked at their beginning only"))
    some = f" of {report['validation_documents']:,}" if "validation_documents" in report else ""
    work.say(f"{total['documents']:,}{some} validation and {report['training_sample']['documents']:,} training "
             f"documents: all read back, all with equal ids in hf/tokenizer.json"
             + "".join(f"; {total[name]:,} validation documents {words}" for name, words in notable if total[name]))


if __name__ == "__main__":
    from drover.pipeline.contract.entry import stage_main  # here: whoever imports this file needs none of it

    sys.exit(stage_main("tokenizer", make_tokenizer))
