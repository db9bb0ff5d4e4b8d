"""A run that never ran, complete or sparse, to make reports of."""

import json
from pathlib import Path

from drover.pipeline.config.data import FilesSource, ShardConfig
from drover.pipeline.config.loading import save_config
from drover.pipeline.config.tree import Config
from drover.pipeline.contract.external_inputs import hashed_now
from drover.pipeline.contract.manifest import Manifest
from drover.pipeline.contract.run import Run, code_hashes
from drover.pipeline.contract.stages import STAGES
from drover.pipeline.core.files import write_json
from drover.pipeline.evaluation.results import DEFINITIONS

EVIL = "</pre><script>alert(1)</script><img src=https://example.org/x.png onerror=alert(2)> ``` & | done"
SOURCES = ("stdlib", "prose")


def config(folder: Path) -> Config:
    text = folder / "input.txt"
    text.write_text("some text\n")
    sources = [FilesSource(kind="files", name=name, paths=[str(text)]) for name in SOURCES]
    return Config(name="made-up", runs_dir=str(folder / "runs"), shard=ShardConfig(sources=sources))


def source_counts(scale: int) -> dict:
    return {"documents_in": 1480 * scale, "train": 1401 * scale, "heldout": 17 * scale,
            "dropped": {"duplicate": 41 * scale, "empty": 20 * scale}, "rejected": scale,
            "text_bytes": {"train": 13_370_421 * scale, "heldout": 143_207 * scale}, "documents_with_nul": 0,
            "documents_with_u2581": 1}


FIELDS = {"fields": {"url": {"in": 1370, "of": 1479}}}


def data_card(scale: int) -> dict:
    return {"documents": 1459 * scale, "changed": 146 * scale, "bytes": 13_600_000 * scale,
            "characters": 13_400_000 * scale, **FIELDS, "lengths": {"8": 100 * scale, "10": 1359 * scale},
            "examples": {"length": {"fewer than 20 words": [{"id": f"a.jsonl:{scale}", "text": f"too\nshort {EVIL}"}]}}}


def tokenizer_entry() -> dict:
    return {"documents": 17, "text_bytes": 143207, "tokens": 40911, "bytes_per_token": 3.500452,
            "characters_per_token": 3.48, "tokens_per_word": 2.913, "fallback_share": 0.00021, "unknown_share": 0.0,
            "round_trip_failures": 0}


COUNTS = {
    "shard": {**source_counts(3), "sources": {"stdlib": source_counts(2), "prose": source_counts(1)},
              "cards": {"stdlib": data_card(2), "prose": {**data_card(1), "languages": {
                  "language": {"en": 1400, "de": 88, "unknown": 12}}}},
              "contamination": {"decontamination": {"gsm8k": {
                  "n": 13, "least_words": 8, "action": "drop", "items": 1319, "too_short": 7, "documents": 41,
                  "found": 33}}}},
    "tokenizer": {"kind": "sentencepiece", "vocab_size": 8192, "bos_id": 1, "eos_id": 2, "encode_mb_per_s": 2.31},
    "encode": {"total": {"docs": 4254, "text_bytes": 40_540_884, "tokens": 11_462_733}, "dtype": "uint16",
               "splits": {split: {source: {"docs": docs, "text_bytes": docs * 9530, "tokens": docs * 2723}
                                  for source in SOURCES} for split, docs in (("train", 2802), ("heldout", 34))}},
    "train": {"checkpoint": "checkpoints/step-00000600", "steps": 600, "tokens": 4_915_200, "samples": 19200,
              "targets": 4_903_110, "restarts": 1, "parameters": 4_327_168, "vocab_size": 8192,
              "epochs": {"all": 0.43}, "plan_sha256": "ab" * 32, "precision": "float32", "ranks": 2,
              "accumulation": 1, "loss": 3.1, "heldout_bpb": {"stdlib": 1.9}, "step_seconds": 172.4},
    "convert": {"parameters": 4_327_168, "dtype": "float32", "tensors_compared": 57,
                "tokens_compared": 512, "layers_compared": 6, "largest_logit": 31.25,
                "largest_logit_difference": 4.1e-05, "training_logit_error": 1.62e-05,
                "transformers_logit_error": 2.37e-05, "single_precision_logit_error": 1.91e-05,
                "argmax_equal": 511, "argmax_decided": 509, "argmax_wrong": 0, "token_loss": 3.0625,
                "training_loss_error": 1.1e-05, "transformers_loss_error": 1.3e-05,
                "single_precision_loss_error": 1.2e-05, "factor": 10.0},
    "evaluate": {"bits_per_byte": 1.93, "device": "cpu", "device_name": None},
}


def entry(bits: float, scale: int) -> dict:
    return {"documents": 17 * scale, "bytes": 143_207 * scale, "targets": 40_894 * scale, "nats": 191_574.123,
            "bits_per_byte": bits, "loss": 4.6846, "perplexity": 108.2641,
            "baselines": {"unigram": 4.7312, "gzip -9": 2.1145, "xz -9": 1.9787}, "entropy": 4.6911}


def results(text: str = "\n    return 0\n") -> dict:
    def task(value: float) -> dict:
        return {"metrics": {"acc": {"value": value, "stderr": 0.0734}, "acc_norm": {"value": 0.275, "stderr": 0.0715}},
                "items": 40, "items_in_file": 40, "few_shot": 0, "kind": "multiple_choice", "version": "1.0",
                "chance": 0.25, "answer_bits_per_byte": 1.2345, "contexts_truncated": 0}
    line, library = task(0.7251), {**task(0.3252), "version": "2.5", "items_in_file": 1234}
    library["metrics"]["mcc"] = {"value": 0.1111, "stderr": 0.0999}
    line["contamination"] = {"too_short": 5, "clean": {"items": 24, "metrics": {
        "acc": {"value": 0.7083, "stderr": 0.0948}, "answer_bits_per_byte": {"value": 1.3021, "stderr": 0.0807}}},
        "dirty": {"items": 11, "metrics": {"acc": {"value": 0.9091, "stderr": 0.0909},
                                           "answer_bits_per_byte": {"value": 1.0033, "stderr": 0.1313}}}}
    library["contamination"] = {"too_short": 40, "clean": {"items": 0, "metrics": {}},
                                "dirty": {"items": 0, "metrics": {}}}
    return {"format": 1, "model": {"parameters": 4_327_168, "non_embedding_parameters": 2_230_016, "vocab_size": 8192,
                                   "context_length": 256, "dtype": "float32"},
            "heldout": {"sources": {"stdlib": entry(1.8712, 2), "prose": entry(2.0517, 1)},
                        "overall": entry(1.9313, 3), "without_heldout_text": [], "window": 256},
            "tasks": {"python_line": line, "python_stdlib": library},
            "continuations": [{"prompt": "def main():\n", "text": text, "tokens": 96, "ended": False},
                              {"prompt": "import os\n", "text": "import sys\n" * 12, "tokens": 60, "ended": True}],
            "sampling": {"temperature": 0.8, "top_p": 0.95, "seed": 0, "max_tokens": 96},
            "definitions": DEFINITIONS, "versions": {"torch": "2.13.0", "lm_eval": "0.4.13"}}


def metrics(steps: int = 600) -> list[dict]:
    found: list[dict] = [{
        "step": step, "loss": 2.9 + 6 / step, "lr": 3e-3 * min(1, step / 50), "grad_norm": 0.6 + 4 / step,
        "samples": [step * 32 - 32, step * 32], "tokens": step * 8192, "tokens_per_s": 28000, "data_wait_s": 0.0004,
        "step_s": 0.29, "memory_mb": 912.5, "mfu": None} for step in range(1, steps + 1)]
    for record in found[99::100]:
        record["heldout_bpb"] = {"stdlib": 1.85 + 200 / record["step"], "prose": 2.02 + 200 / record["step"]}
    return found


def block(document, title):
    """The table or chart of a report that has this title."""
    return next(block for chapter in document.chapters for block in chapter.blocks
                if getattr(block, "title", "") == title)


def lines(path: Path, records: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def write_run(folder: Path, *, sparse: bool = False, drift: bool = False, text: str = EVIL) -> tuple[Run, Config]:
    """Manifests of every stage before the report, and the files beside them; `sparse` has the manifests alone."""
    settings = config(folder)
    run = Run(settings)
    run.folder.mkdir(parents=True)
    save_config(settings, run.folder / "config.yaml")
    for number, name in enumerate(STAGES["report"].needs):
        files = [*run.files(name), *hashed_now(run.listing(name))]
        identity = {key: value for key, value in run.fingerprint(name).items() if key != "listing"}
        manifest = Manifest(
            stage=name, fingerprint=identity | {"files": {file["name"]: file["sha256"] for file in files}},
            outputs=[], counts={} if sparse else COUNTS[name],
            config_sha256="0" * 64, files=files, wall_s=[4.2, 21.7, 9.1, 181.3, 6.6, 24.9][number],
            started="2026-03-01T10:00:00+00:00", finished="2026-03-01T10:03:00+00:00",
            software={} if sparse else {"python": "3.11.9", "torch": "2.13.0", "numpy": f"2.4.{min(number, 1)}"},
            git={} if sparse else {"commit": f"{'c0ffee' * 7}"[:40], "changed": number == 3},
            execution={} if sparse else {"host": "box", "processes": 2, "cores": 2,
                                         "world_size": 2 if STAGES[name].ranks else 1},
            drift=[{"stage": "encode", "differences": ["encode.dtype: \"uint16\" -> \"uint32\""]}] if drift else [])
        manifest.code = code_hashes(STAGES[name])
        if name == "convert" and drift:
            manifest.code["pipeline/convert.py"] = "another"
        if not sparse:
            place = run.stage_folder(name)
            if name == "train":
                # Steps 1 to 9 were done twice: the first attempt's values must not be shown.
                lines(place / "metrics.jsonl", [{**record, "loss": 99.0} for record in metrics(9)] + metrics())
                lines(place / "samples.jsonl", [{"step": step, "prompt": prompt, "text": f"{prompt}{step} {text}"}
                                                for step in (200, 400, 600) for prompt in ("class ", "import ")])
                lines(place / "events.jsonl", [
                    {"event": "start", "time": "2026-03-01T10:00:01.000+00:00", "step": 0, "ranks": 2, "samples": 0},
                    {"event": "checkpoint", "time": "2026-03-01T10:00:09.000+00:00", "step": 9, "path": "x"},
                    {"event": "resume", "time": "2026-03-01T10:01:00.000+00:00", "step": 9, "ranks": 2, "samples": 288},
                    {"event": "finish", "time": "2026-03-01T10:03:00.000+00:00", "step": 600}])
            if name == "evaluate":
                write_json(place / "results.json", results(text))
            if name == "tokenizer":
                write_json(place / "report.json", {
                    "kind": "sentencepiece", "size": 8192, "used": 8192, "special_ids": 256, "pieces": 7679,
                    "checked": "held-out text", "marks_as_spaces": 4321,
                    "unused_pieces": 12, "unused_examples": [], "total": tokenizer_entry(),
                    "longest_pieces": ["                ", "ValueError"],
                    "sources": {source: tokenizer_entry() for source in SOURCES}})
        manifest.write(run.own_folder(name))
    return Run(settings), settings
