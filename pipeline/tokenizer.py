"""Stage 2, tokenizer: train the vocabulary or take a ready one, export it for Hugging Face, prove both, report."""

from __future__ import annotations

import sys
from pathlib import Path

if __package__ in (None, ""):  # run as a script: find the packages, and shadow no library with a file beside this one
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import shutil
from dataclasses import asdict
from typing import Any

from pipeline.config.data import TokenizerConfig
from pipeline.data.text_shards import read_shard, shard_records
from pipeline.entry import stage_main
from pipeline.files import atomic_file, output_record, write_json, write_text
from pipeline.vocabulary.base import Vocabulary
from pipeline.vocabulary.checking import check_shard, from_bitmap, refuse_failures, summed
from pipeline.vocabulary.export import write_hugging_face
from pipeline.vocabulary.kinds import FILES, load_vocabulary, open_vocabulary, place, placed, write_record
from pipeline.vocabulary.reporting import as_markdown, described
from pipeline.vocabulary.simple import write_characters
from pipeline.vocabulary.training import Sample, sampled, train_sentencepiece
from pipeline.work import Unit, Work

LOOK_BYTES = 3_000_000
"""Training text (beginnings of all shards) that is checked beside the held-out text and shows which pieces occur."""


def make_vocabulary(work: Work) -> None:
    """The stage: one vocabulary, made of the training split or taken, and proved on every held-out document."""
    shards, manifest = work.input("shard")
    train, heldout = (shard_records(manifest, split) for split in ("train", "heldout"))
    made = _made(work, shards, train)
    vocabulary = load_vocabulary(work.folder)

    limit = LOOK_BYTES // max(1, len(train))
    units = [*(_check_unit(place(shards, work.folder), record, vocabulary, None) for record in heldout),
             *(_check_unit(place(shards, work.folder), record, vocabulary, limit) for record in train)]
    checks = work.do_units("check", units, check_shard, "shards")
    refuse_failures(summed(checks), [failure for check in checks for failure in check["failures"]])

    tallies = {source: summed(check for check, record in zip(checks, heldout, strict=False)
                              if record["source"] == source) for source in {record["source"] for record in heldout}}
    seen = set().union(*(from_bitmap(check["seen"]) for check in checks))
    report = described(vocabulary, tallies, summed(checks[len(heldout):]), seen)
    write_json(work.folder / "report.json", report)
    write_text(work.folder / "report.md", as_markdown(report))
    outputs = [*made["outputs"], *(output_record(work.folder, work.folder / name)
                                   for name in ("report.json", "report.md"))]
    everything = summed(checks).text_bytes / 1e6
    speed = everything / max(1e-9, sum(check["encode_s"] for check in checks))
    work.commit(outputs, _told(work, vocabulary, report, made["sample"], speed))


def _made(work: Work, shards: Path, train: list[dict[str, Any]]) -> dict[str, Any]:
    settings = work.config.tokenizer
    if settings.path is not None:
        work.say(f"taking {settings.path}")
    else:
        work.say(f"making a {settings.kind} vocabulary of {sum(record['text_bytes'] for record in train) / 1e6:.1f} MB "
                 f"of training text in {len(train)} shards")
    payload = {"settings": settings.model_dump(mode="json"), "shards": place(shards, work.folder),
               "records": train}
    [made] = work.do_units("make", [Unit("vocabulary", payload)], make, "vocabulary")
    if made["sample"]["nul_characters"]:
        work.say(f"{made['sample']['nul_characters']} NUL characters were left out of the text that was trained on")
    return made


def _check_unit(shards: str, record: dict[str, Any], vocabulary: Vocabulary, limit: int | None) -> Unit:
    name = Path(record["path"]).with_suffix("").as_posix().replace("/", "-")
    return Unit(name, {"shards": shards, "record": record, "sha256": vocabulary.sha256, "limit": limit})


def make(folder: Path, payload: dict[str, Any]) -> dict[str, Any]:
    """Unit of work: the vocabulary's file, its description and its Hugging Face export."""
    settings, sample = TokenizerConfig.model_validate(payload["settings"]), Sample()
    path = folder / name if (name := FILES[settings.kind]) else None
    bounds = None
    if path is not None and settings.path is not None:
        # Opened where it lies: a Hugging Face tokenizer is told its BOS and EOS by a file beside it.
        bounds = open_vocabulary(settings.kind, Path(settings.path)).bounds
        with open(settings.path, "rb") as source, atomic_file(path) as target:
            shutil.copyfileobj(source, target)
    elif path is not None:
        _train(settings, placed(folder, payload["shards"]), payload["records"], path, sample)
    vocabulary = open_vocabulary(settings.kind, path, bounds)
    files = [*([path] if path else []), write_record(folder, vocabulary),
             *write_hugging_face(vocabulary, folder / "hf")]
    return {"outputs": [output_record(folder, file) for file in files], "sample": asdict(sample)}


def _train(settings: TokenizerConfig, shards: Path, records: list[dict[str, Any]], path: Path, sample: Sample) -> None:
    documents = ((document.key, document.text) for record in records for document in read_shard(shards, record))
    if settings.kind == "char":
        write_characters(path, (text for _, text in documents))
        return
    share = settings.train_mb * 1e6 / max(1, sum(record["text_bytes"] for record in records))
    train_sentencepiece(sampled(documents, share, settings.seed, sample), settings, path, path.with_name("train.log"))


def _told(work: Work, vocabulary: Vocabulary, report: dict[str, Any], sample: dict[str, Any],
          speed: float) -> dict[str, Any]:
    """The stage's counts, and the lines that say the most important of them. Speeds stand here alone: files that
    hold times would have another hash after each run."""
    total = report["total"]
    work.say(f"{vocabulary.kind}: {vocabulary.size:,} ids, {total['bytes_per_token'] or 0:.3f} bytes per token, "
             f"{total['fallback_share'] or 0:.3%} byte fallback, {speed:.1f} MB/s per process")
    notable = (("literal_marks", "with U+2581, read back as a space"), ("nul_documents", "with NUL"),
               ("cut_documents", "encoded in parts"))
    work.say(f"{total['documents']:,} held-out and {report['training_sample']['documents']:,} training documents: all "
             f"read back, all with equal ids in hf/tokenizer.json"
             + "".join(f"; {total[name]:,} held-out {words}" for name, words in notable if total[name]))
    return {"kind": vocabulary.kind, "vocab_size": vocabulary.size, "used": vocabulary.used,
            "bos_id": vocabulary.bos_id, "eos_id": vocabulary.eos_id, "sha256": vocabulary.sha256,
            "trained_on": sample, "heldout": total, "unused_pieces": report["unused_pieces"],
            "encode_mb_per_s": round(speed, 3)}


if __name__ == "__main__":
    sys.exit(stage_main("tokenizer", make_vocabulary))
