"""Stages evaluate and report on a small run: text through the real first stages, a model of random weights."""

import gzip
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from model.llama import Llama, initialise
from pipeline.config.loading import load_config
from pipeline.data.text_shards import read_shard, shard_records
from pipeline.encode import encode
from pipeline.entry import stage_main
from pipeline.evaluate import evaluate
from pipeline.files import output_record
from pipeline.formats.huggingface import write_folder
from pipeline.manifest import Manifest
from pipeline.report import report
from pipeline.run import Run, code_hashes
from pipeline.shard import shard
from pipeline.stages import REPOSITORY, STAGES
from pipeline.tokenizer import make_vocabulary

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


@pytest.fixture(scope="module")
def small_run(tmp_path_factory):
    """Everything up to convert; returns the configuration's file."""
    folder = tmp_path_factory.mktemp("small")
    for name, template in (("code", "def function_{0}(x):\n    return x * {0} + {0}"),
                           ("prose", "Paragraph {0} tells of number {0}, größer than the last. " + "So it goes. " * 9)):
        (folder / f"{name}.txt").write_text("\n\n".join(template.format(number) for number in range(30)))
    (folder / "words.yaml").write_text(TASK)
    (folder / "words.jsonl").write_text("".join(json.dumps(
        {"query": f"Item {number}:", "choices": ["yes", "no", "perhaps"], "gold": number % 3}) + "\n"
        for number in range(7)))
    config = folder / "small.yaml"
    config.write_text(yaml.safe_dump(settings(folder)))
    for name, body in (("shard", shard), ("tokenizer", make_vocabulary), ("encode", encode)):
        assert stage_main(name, body, ["--config", str(config)]) == 0
    fake_training(Run(load_config(config)))
    return config


def fake_training(run):
    """Manifests of train and convert around a model of random weights."""
    shape = run.config.model.model_copy(update={"vocab_size": run.finished("tokenizer").counts["vocab_size"]})
    model = Llama(shape)
    initialise(model, shape, seed=5)
    write_folder(run.own_folder("convert") / "hf", model.state_dict(), shape, dtype=torch.float32, bos_id=None,
                 eos_id=None)
    for name, counts in (("train", {"steps": 3, "tokens": 999, "parameters": shape.parameter_count}), ("convert", {})):
        folder = run.own_folder(name)
        outputs = [output_record(folder, path) for path in sorted(folder.glob("hf/*"))]
        Manifest(stage=name, fingerprint=run.fingerprint(name), outputs=outputs, counts=counts, config_sha256="",
                 code=code_hashes(STAGES[name]), finished="2026-03-01T10:00:00+00:00").write(folder)


def run_ranks(config, world, *arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world), "-m",
               "pipeline.evaluate", "--config", str(config), *arguments]
    return subprocess.run(command, cwd=REPOSITORY, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True,
                          text=True, timeout=300)


@pytest.fixture(scope="module")
def evaluated(small_run):
    """Results of a single process: (folder, results)."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert stage_main("evaluate", evaluate, ["--config", str(small_run)]) == 0
    finally:
        torch.set_num_threads(threads)
    folder = Run(load_config(small_run)).own_folder("evaluate")
    return folder, json.loads((folder / "results.json").read_text())


@pytest.fixture
def copied(small_run, tmp_path):
    """Arguments for a stage of another run that is at the same point, before evaluate."""
    run = Run(load_config(small_run))
    shutil.copytree(run.folder, tmp_path / "copy", ignore=shutil.ignore_patterns("evaluate", "report*"))
    return ["--config", str(small_run), f"runs_dir={tmp_path}", "name=copy"]


def test_what_is_measured(small_run, evaluated):
    folder, results = evaluated
    run = Run(load_config(small_run))
    held = results["heldout"]
    for source in ("code", "prose"):
        texts = [document.text.encode() for record in shard_records(run.finished("shard"), "heldout", source)
                 for document in read_shard(run.stage_folder("shard"), record)]
        entry = held["sources"][source]
        assert (entry["documents"], entry["bytes"]) == (len(texts), sum(map(len, texts)))
        assert entry["targets"] == entry["bytes"] + len(texts), "bytes are tokens here, and each document has an EOS"
        assert entry["baselines"]["gzip -9"] == pytest.approx(
            8 * len(gzip.compress(b"".join(texts), 9)) / entry["bytes"], abs=1e-6)
        # Random weights know nothing: log2 of the vocabulary for each token, and what logits of variance 1 add to it.
        assert entry["bits_per_byte"] == pytest.approx((9 + 0.5 / math.log(2)) * entry["targets"] / entry["bytes"],
                                                       rel=0.1)
    total = held["overall"]
    assert total["bytes"] == sum(entry["bytes"] for entry in held["sources"].values())
    assert total["nats"] == pytest.approx(sum(entry["nats"] for entry in held["sources"].values()), abs=1e-5)
    assert results["tasks"]["words"]["items"] == 7
    assert results["tasks"]["words"]["chance"] == pytest.approx(1 / 3, abs=1e-6)
    assert [entry["prompt"] for entry in results["continuations"]] == ["def ", "x"]
    assert "words" in (folder / "results.md").read_text()


def test_the_exported_model_is_what_is_measured(small_run, evaluated):
    """The nats of one source by the simplest way: one document, one piece at a time, through transformers."""
    from transformers import AutoModelForCausalLM

    from pipeline.data.token_shards import open_shards
    run = Run(load_config(small_run))
    model = AutoModelForCausalLM.from_pretrained(run.own_folder("convert") / "hf").eval()
    nats = 0.0
    for token_shard in open_shards(run.stage_folder("encode"), run.finished("encode").outputs, "heldout", "prose"):
        for number in range(token_shard.documents):
            ids = torch.from_numpy(token_shard.document_tokens(number).astype("int64"))
            for start in range(0, len(ids) - 1, 64):
                piece = ids[start:start + 65]
                with torch.no_grad():
                    scores = model(piece[None, :-1]).logits.double().log_softmax(-1)[0]
                nats -= float(scores.gather(-1, piece[1:, None]).sum())
    assert evaluated[1]["heldout"]["sources"]["prose"]["nats"] == pytest.approx(nats, rel=1e-5)


def test_two_ranks_write_the_same_bytes(small_run, evaluated):
    folder, _ = evaluated
    alone = {name: (folder / name).read_bytes() for name in ("results.json", "results.md")}
    ended = run_ranks(small_run, 2, "--force")
    assert ended.returncode == 0, ended.stderr
    assert {name: (folder / name).read_bytes() for name in alone} == alone
    assert json.loads((folder / "manifest.json").read_text())["counts"]["ranks"] == 2


def test_again_it_is_up_to_date(small_run, evaluated, capsys):
    assert stage_main("evaluate", evaluate, ["--config", str(small_run)]) == 0
    assert "up to date" in capsys.readouterr().out


@pytest.mark.parametrize(("override", "message"), [
    ("evaluate.sequence_length=65", "65 is longer than model.context_length 64"),
    (f"evaluate.prompts=['{'x' * 70}']", "leaves no room in the model's context of 64"),
    ("evaluate.tasks=[word]", "did you mean words"),
])
def test_what_cannot_be_measured_is_said(copied, override, message, capsys):
    assert stage_main("evaluate", evaluate, [*copied, override]) == 2
    assert message in capsys.readouterr().err


def test_tokens_of_another_text_are_refused(copied, capsys, monkeypatch):
    from pipeline.data.token_shards import TokenShard
    monkeypatch.setattr(TokenShard, "document_bytes", lambda self, index: 1)
    assert stage_main("evaluate", evaluate, copied) == 2
    assert "was made of another text" in capsys.readouterr().err


def test_the_report_of_the_run(small_run, evaluated, capsys):
    assert stage_main("report", report, ["--config", str(small_run)]) == 0
    run = Run(load_config(small_run))
    for name in ("report.html", "report.md"):
        inner, outer = (run.own_folder("report") / name).read_text(), (run.folder / name).read_text()
        assert inner == outer
        assert f"{evaluated[1]['heldout']['overall']['bits_per_byte']:.4f}" in outer
    assert str(Path(run.folder / "report.html").absolute()) in capsys.readouterr().out


def test_evaluate_imports_nothing_heavy_for_the_launcher():
    code = ("import sys; sys.path.insert(0, sys.argv[1]); import pipeline.evaluate, pipeline.report, pipeline.stages; "
            "from pipeline.config.loading import load_config; "
            "pipeline.stages.STAGES['evaluate'].input_files(load_config(sys.argv[2])); "
            "print([name for name in ('torch', 'lm_eval', 'datasets', 'matplotlib', 'jinja2') if name in sys.modules])")
    found = subprocess.run([sys.executable, "-c", code, str(REPOSITORY), str(REPOSITORY / "configs" / "demo.yaml")],
                           capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


