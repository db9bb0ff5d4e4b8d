"""A small run up to convert: text through the real first stages, a model of random weights."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import torch
import yaml

from drover.model.llama import Llama, initialise
from drover.pipeline.config.loading import load_config
from drover.pipeline.contract.entry import stage_main
from drover.pipeline.contract.manifest import Manifest
from drover.pipeline.contract.run import Run, code_hashes
from drover.pipeline.contract.stages import STAGES
from drover.pipeline.convert import convert
from drover.pipeline.core.files import output_record, write_json
from drover.pipeline.encode import encode
from drover.pipeline.formats.weights import MODEL
from drover.pipeline.records.checkpoints import FORMAT, MARKER, TrainingProgress
from drover.pipeline.shard import shard
from drover.pipeline.tokenizer import make_tokenizer
from tests.formats.cutting import write_checkpoint

TASK = """
task: words
dataset_path: json
dataset_kwargs: {data_files: {test: words.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{query}}"
doc_to_choice: choices
doc_to_target: gold
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""


def settings(folder):
    return {"name": "small", "runs_dir": str(folder / "runs"),
            "shard": {"heldout_share": 0.4, "shard_mb": 0.002, "sources": [
                {"kind": "files", "name": name, "paths": [str(folder / f"{name}.txt")], "separator": "\n\n"}
                for name in ("code", "prose")]},
            "tokenizer": {"kind": "byte"}, "model": {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2,
                                                     "context_length": 64},
            "evaluate": {"tasks": ["words"], "task_folders": [str(folder)], "batch": 3, "prompts": ["def ", "x"],
                         "prompt_tokens": 12},
            "train": {"sequence_length": 64, "sample_tokens": 16}, "launch": {"processes": 1}}


def make_small_run(folder):
    """Everything up to convert; returns the configuration's file."""
    config = make_trained_run(folder)
    assert stage_main("convert", convert, ["--config", str(config)]) == 0
    return config


def make_trained_run(folder):
    """Everything up to train."""
    for name, template in (("code", "def function_{0}(x):\n    return x * {0} + {0}"),
                           ("prose", "Paragraph {0} tells of number {0}, größer than the last. " + "So it goes. " * 9)):
        (folder / f"{name}.txt").write_text("\n\n".join(template.format(number) for number in range(30)))
    (folder / "words.yaml").write_text(TASK)
    (folder / "words.jsonl").write_text("".join(json.dumps(
        {"query": f"Item {number}:", "choices": ["yes", "no", "perhaps"], "gold": number % 3}) + "\n"
        for number in range(7)))
    config = folder / "small.yaml"
    config.write_text(yaml.safe_dump(settings(folder)))
    for name, body in (("shard", shard), ("tokenizer", make_tokenizer), ("encode", encode)):
        assert stage_main(name, body, ["--config", str(config)]) == 0
    fake_training(Run(load_config(config)))
    return config


def fake_training(run, moments=True):
    """A finished stage train: weights and, unless they are left out, one moment, cut at random over three ranks."""
    shape = run.config.model.model_copy(update={"vocab_size": run.finished("tokenizer").counts["vocab_size"]})
    model = Llama(shape)
    initialise(model, shape, seed=5)
    folder = run.own_folder("train")
    checkpoint = folder / "checkpoints/step-00000003"
    state = {name: parameter.detach() for name, parameter in model.named_parameters()}
    records = write_checkpoint(checkpoint, {MODEL + name: tensor for name, tensor in state.items()}
                               | {f"exp_avg.{name}": torch.ones_like(tensor) for name, tensor in state.items()
                                  if moments})
    write_json(checkpoint / MARKER, {"format": FORMAT, "progress": asdict(TrainingProgress(step=3)), "files": records})
    counts = {"checkpoint": "checkpoints/step-00000003", "vocab_size": shape.vocab_size, "steps": 3, "tokens": 999,
              "parameters": shape.parameter_count}
    Manifest(stage="train", fingerprint=run.fingerprint("train"), counts=counts, config_sha256="",
             outputs=[output_record(folder, checkpoint / record["path"]) for record in records],
             code=code_hashes(STAGES["train"]), finished="2026-03-01T10:00:00+00:00").write(folder)


def copy_of(small_run, tmp_path):
    """Arguments for a stage of another run that is at the same point, before evaluate."""
    run = Run(load_config(small_run))
    shutil.copytree(run.folder, tmp_path / "copy", ignore=lambda folder, names: {
        name for name in names if Path(folder) == run.folder and name.startswith(("evaluate", "report"))})
    return ["--config", str(small_run), f"runs_dir={tmp_path}", "name=copy"]


def told_of(output, part):
    """What the stage said of one of its parts: whether it was kept."""
    line, = (line for line in output.splitlines() if line.startswith(f"evaluate  {part}: "))
    return "kept" if line.endswith("measured before, kept") else "measured"
