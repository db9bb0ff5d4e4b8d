"""A small run up to convert: text through the real first stages, a model of random weights."""

import shutil
from pathlib import Path

import yaml

from drover.model.llama import Llama, initialise
from drover.pipeline.config.loading import load_config
from drover.pipeline.contract.manifest import Manifest
from drover.pipeline.contract.run import Run, code_hashes
from drover.pipeline.contract.stages import STAGES
from drover.pipeline.core.files import output_record
from drover.pipeline.records.checkpoints import MARKER
from tests.data.source_files import write_jsonl
from tests.stages.here import prepare_here
from tests.tiny_models import as_checkpoint

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


def item(number, gold):
    """An item of a task: a question with three answers."""
    return {"query": f"Item {number}:", "choices": ["yes", "no", "perhaps"], "gold": gold}


def write_task(folder, name, *items):
    """A task of these items, in files of its name, with the folders that lead to them."""
    write_jsonl(folder / f"{name}.jsonl", items)
    (folder / f"{name}.yaml").write_text(TASK.replace("words", name))


def settings(folder):
    return {"name": "small", "runs_dir": str(folder / "runs"),
            "shard": {"validation_share": 0.4, "shard_mb": 0.002, "sources": [
                {"kind": "files", "name": name, "paths": [str(folder / f"{name}.txt")], "separator": "\n\n"}
                for name in ("code", "prose")]},
            "tokenizer": {"kind": "byte"}, "model": {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2,
                                                     "context_length": 64},
            "evaluate": {"tasks": ["words"], "task_folders": [str(folder)], "batch": 3, "prompts": ["def ", "x"],
                         "prompt_tokens": 12},
            "train": {"sequence_length": 64, "sample_tokens": 16}, "launch": {"processes": 1}}


def make_trained_run(folder):
    """Everything up to train; returns the configuration's file."""
    for name, template in (("code", "def function_{0}(x):\n    return x * {0} + {0}"),
                           ("prose", "Paragraph {0} tells of number {0}, größer than the last. " + "So it goes. " * 9)):
        (folder / f"{name}.txt").write_text("\n\n".join(template.format(number) for number in range(30)))
    write_task(folder, "words", *(item(number, number % 3) for number in range(7)))
    config = folder / "small.yaml"
    config.write_text(yaml.safe_dump(settings(folder)))
    prepare_here(config)
    fake_training(config)
    return config


def fake_training(config, kinds=("model", "exp_avg")):
    """A finished stage train of a configuration's run: weights and one moment, unless `kinds` says otherwise, cut at
    random over three ranks."""
    run = Run(load_config(config))
    shape = run.config.model.model_copy(update={"vocab_size": run.finished("tokenizer").counts["vocab_size"]})
    model = Llama(shape)
    initialise(model, shape, seed=5)
    folder = run.own_folder("train")
    checkpoint = as_checkpoint(folder / "checkpoints/step-00000003", model, 3, kinds)
    counts = {"checkpoint": "checkpoints/step-00000003", "vocab_size": shape.vocab_size, "steps": 3, "tokens": 999,
              "parameters": shape.parameter_count}
    Manifest(stage="train", fingerprint=run.fingerprint("train"), counts=counts, config_sha256="",
             outputs=[output_record(folder, path) for path in sorted(checkpoint.iterdir()) if path.name != MARKER],
             code=code_hashes(STAGES["train"]), finished="2026-03-01T10:00:00+00:00").write(folder)


def copy_of(small_run, tmp_path):
    """Config and overrides of another run that is at the same point, before evaluate."""
    run = Run(load_config(small_run))
    shutil.copytree(run.folder, tmp_path / "copy", ignore=lambda folder, names: {
        name for name in names if Path(folder) == run.folder and name.startswith(("evaluate", "report"))})
    return small_run, f"runs_dir={tmp_path}", "name=copy"


def kept_parts(output, *parts):
    """What the stage said of each of these parts, once: whether it was kept."""
    return ["kept" if line.endswith("measured before, kept") else "measured" for part in parts
            for line in output.splitlines() if line.startswith(f"evaluate  {part}: ")]
