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

from launch.plan import Options, plan
from model.llama import Llama, initialise
from pipeline.config.loading import load_config
from pipeline.contract.entry import INTERRUPTED, stage_main
from pipeline.contract.manifest import Manifest, read_manifest
from pipeline.contract.run import Run, code_hashes
from pipeline.contract.stages import REPOSITORY, STAGES
from pipeline.data.text_shards import read_shard, shard_records
from pipeline.encode import encode
from pipeline.evaluate import evaluate
from pipeline.files import output_record
from pipeline.report import report
from pipeline.shard import shard
from pipeline.tokenization.export import write_hugging_face
from pipeline.tokenization.kinds import load_tokenizer
from pipeline.tokenizer import make_tokenizer
from tests.formats.exporting import write_model
from tests.waiting import HANG_S

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
    for name, body in (("shard", shard), ("tokenizer", make_tokenizer), ("encode", encode)):
        assert stage_main(name, body, ["--config", str(config)]) == 0
    fake_training(Run(load_config(config)))
    return config


def fake_training(run):
    """Manifests of train and convert around a model of random weights."""
    shape = run.config.model.model_copy(update={"vocab_size": run.finished("tokenizer").counts["vocab_size"]})
    model = Llama(shape)
    initialise(model, shape, seed=5)
    write_model(run.own_folder("convert") / "hf", model, dtype=torch.float32, bos_id=None, eos_id=None)
    write_hugging_face(load_tokenizer(run.stage_folder("tokenizer")), run.own_folder("convert") / "hf")
    for name, counts in (("train", {"steps": 3, "tokens": 999, "parameters": shape.parameter_count}), ("convert", {})):
        folder = run.own_folder(name)
        outputs = [output_record(folder, path) for path in sorted(folder.glob("hf/*"))]
        Manifest(stage=name, fingerprint=run.fingerprint(name), outputs=outputs, counts=counts, config_sha256="",
                 code=code_hashes(STAGES[name]), finished="2026-03-01T10:00:00+00:00").write(folder)


def run_ranks(config, world, *arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world), "-m",
               "pipeline.evaluate", "--config", str(config), *arguments]
    return subprocess.run(command, cwd=REPOSITORY, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True,
                          text=True, timeout=HANG_S)


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
    shutil.copytree(run.folder, tmp_path / "copy", ignore=lambda folder, names: {
        name for name in names if Path(folder) == run.folder and name.startswith(("evaluate", "report"))})
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

    from pipeline.data.shard_table import open_shards
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


def test_the_comparison_has_the_stages_figures(small_run, evaluated, tmp_path, capsys):
    """Held-out bits per byte and tasks of the same model, measured document by document and item by item."""
    from tools.compare import main
    run = Run(load_config(small_run))
    assert main(["--models", str(run.folder), "--heldout", str(run.folder), "--tasks", "words", "--to",
                 str(tmp_path / "to"), "--task-folders", str(small_run.parent)]) == 0
    found = {(row["task"], row["metric"]): row["value"]
             for row in json.loads((tmp_path / "to/comparison.json").read_text())["scores"]}
    results = evaluated[1]
    assert found["held-out text of small", "bits_per_byte"] == pytest.approx(
        results["heldout"]["overall"]["bits_per_byte"], abs=1e-6)
    assert found["words", "acc"] == pytest.approx(results["tasks"]["words"]["metrics"]["acc"]["value"], abs=1e-6)
    assert found["words", "answer_bits_per_byte"] == pytest.approx(
        results["tasks"]["words"]["answer_bits_per_byte"], abs=1e-5)


def test_a_part_of_the_heldout_text_is_measured_and_said(small_run, evaluated, copied, tmp_path, capsys):
    """The documents that training looks at first; their texts, in order, are what the baselines are of. Another amount
    costs the figures of held-out text only, and is asked for without --force."""
    from pipeline.data.chosen_documents import ChosenDocuments, choose
    from pipeline.data.shard_table import open_shards
    run = Run(load_config(small_run))
    limit = 200
    assert stage_main("evaluate", evaluate, [*copied, "evaluate.heldout_tokens=null"]) == 0
    everything = json.loads((tmp_path / "copy/evaluate/results.json").read_text())
    assert everything == evaluated[1], "the default takes all of so little"
    capsys.readouterr()
    assert stage_main("evaluate", evaluate, [*copied, f"evaluate.heldout_tokens={limit}",
                                             "evaluate.compressed_mb=0.0001"]) == 0
    told = capsys.readouterr().out
    assert told_of(told, "held-out text") == told_of(told, "baselines") == "measured"
    assert told_of(told, "task words") == told_of(told, "continuations") == "kept"
    results = json.loads((tmp_path / "copy/evaluate/results.json").read_text())
    for source in ("code", "prose"):
        entry = results["heldout"]["sources"][source]
        shards = open_shards(run.stage_folder("encode"), run.finished("encode").outputs, "heldout", source)
        chosen = {bytes(ids[1:-1].astype("uint8")) for ids in
                  ChosenDocuments(shards, choose(shards, limit))}
        texts = [document.text.encode() for record in shard_records(run.finished("shard"), "heldout", source)
                 for document in read_shard(run.stage_folder("shard"), record)]
        assert 0 < len(chosen) < len(texts) and entry["documents"] == len(chosen) and entry["of_documents"] == len(
            texts)
        assert entry["bytes"] == sum(map(len, chosen)) and limit <= entry["tokens"] < entry["of_tokens"]
        given = b""
        for text in texts:
            given += text if text in chosen and len(given) < 100 else b""
        assert entry["compressed_bytes"] == len(given) < entry["bytes"]
        assert entry["baselines"]["gzip -9"] == pytest.approx(8 * len(gzip.compress(given, 9)) / len(given), abs=1e-6)
        assert f"{source}: measured on {len(chosen):,} of {len(texts):,} held-out documents" in told
    page = (tmp_path / "copy/evaluate/results.md").read_text()
    assert "Measured on " in page and f"of {results['heldout']['overall']['of_tokens']:,} tokens)" in page


@pytest.mark.parametrize("shards", [1, 2])
def test_two_ranks_write_the_same_bytes(small_run, evaluated, shards):
    """Also where neither holds the model: nothing but memory depends on that."""
    folder, _ = evaluated
    alone = {name: (folder / name).read_bytes() for name in ("results.json", "results.md")}
    ended = run_ranks(small_run, 2, "--force", f"evaluate.memory_gb={1 if shards == 1 else 1e-6}")
    assert ended.returncode == 0, ended.stderr
    assert {name: (folder / name).read_bytes() for name in alone} == alone
    counts = json.loads((folder / "manifest.json").read_text())["counts"]
    assert (counts["ranks"], counts["dp_shard"]) == (2, shards)
    assert ("weights sharded over 2 ranks (FSDP2" in ended.stdout) == (shards == 2)


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
    code = ("import sys; sys.path.insert(0, sys.argv[1]); import pipeline.evaluate, pipeline.report, "
            "pipeline.contract.stages; "
            "from pipeline.config.loading import load_config; "
            "pipeline.contract.stages.STAGES['evaluate'].input_files(load_config(sys.argv[2])); "
            "print([name for name in ('torch', 'lm_eval', 'datasets', 'matplotlib', 'jinja2') if name in sys.modules])")
    found = subprocess.run([sys.executable, "-c", code, str(REPOSITORY), str(REPOSITORY / "configs" / "demo.yaml")],
                           capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"




@pytest.fixture
def tasks(copied, tmp_path):
    """Function: run the stage of a run of its own with these tasks; they are `one`, `two` and `broken`."""
    for number, name in enumerate(("one", "two", "broken")):
        (tmp_path / f"{name}.yaml").write_text(TASK.replace("words", name))
        gold = ["yes", "no"] if name == "broken" else number
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(
            {"query": f"Item {item}:", "choices": ["yes", "no", "perhaps"], "gold": gold}) + "\n" for item in range(4)))

    def run(*names, stage="evaluate", body=evaluate):
        return stage_main(stage, body, [*copied, f"evaluate.task_folders=[{tmp_path}]",
                                        f"evaluate.tasks=[{', '.join(names)}]"])
    return run


def told_of(output, part):
    """What the stage said of one of its parts: whether it was kept."""
    line, = (line for line in output.splitlines() if line.startswith(f"evaluate  {part}: "))
    return "kept" if line.endswith("measured before, kept") else "measured"


def test_other_tasks_cost_only_themselves(tasks, tmp_path, capsys):
    """Taking tasks out and in needs no --force and measures nothing again; the report follows."""
    assert tasks("one") == 0 and tasks("one", stage="report", body=report) == 0
    changed = load_config(tmp_path / "copy/config.yaml", ["evaluate.tasks=[two, one]"])
    jobs = plan(changed, Run(changed), ["evaluate", "report"], Options("slurm", "c.yaml"))
    assert [(job.stage, job.state.kind) for job in jobs] == [("evaluate", "partial"), ("report", "waiting")]
    first = json.loads((tmp_path / "copy/evaluate/results.json").read_text())
    capsys.readouterr()
    assert tasks("two", "one") == 0
    told = capsys.readouterr().out
    assert "changed: evaluate.tasks.0" in told and "changed: input file two/two.yaml is new" in told
    assert [told_of(told, part) for part in ("held-out text", "continuations", "task one")] == ["kept"] * 3
    assert told_of(told, "task two") == "measured"
    both = json.loads((tmp_path / "copy/evaluate/results.json").read_text())
    assert list(both["tasks"]) == ["two", "one"] and both["tasks"]["one"] == first["tasks"]["one"]
    assert tasks("two", "one", stage="report", body=report) == 0
    assert "| two |" in (tmp_path / "copy/report.md").read_text()
    assert tasks() == 0
    none = json.loads((tmp_path / "copy/evaluate/results.json").read_text())
    assert none == {**first, "tasks": {}}
    capsys.readouterr()
    assert tasks("one") == 0
    assert told_of(capsys.readouterr().out, "task one") == "kept"
    assert json.loads((tmp_path / "copy/evaluate/results.json").read_text()) == first


def test_what_other_code_measured_is_measured_again(tasks, capsys, monkeypatch):
    """Else the manifest would name code that did not make it."""
    assert tasks("one") == 0
    monkeypatch.setattr("pipeline.evaluation.kept.code_hashes", lambda stage: {"pipeline/evaluate.py": "another"})
    capsys.readouterr()
    assert tasks("one", "two") == 0
    told = capsys.readouterr().out
    assert {told_of(told, part) for part in ("held-out text", "task one", "task two")} == {"measured"}


def test_items_in_the_training_text_are_told_apart(tasks, copied, tmp_path, capsys):
    """Turned on for a finished stage it costs one pass over the text; every other item stands there."""
    run = Run(load_config(copied[1], copied[2:]))
    texts = [document.text for record in shard_records(run.finished("shard"), "train")
             for document in read_shard(run.stage_folder("shard"), record) if document.source == "prose"]
    items = [{"query": " ".join(text.split()[:10]).upper() if number % 2 else f"Nobody wrote item {number} so far:",
              "choices": ["So it goes.", "no"], "gold": 0} for number, text in enumerate(texts[:6])]
    (tmp_path / "one.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    assert tasks("one") == 0
    before = json.loads((tmp_path / "copy/evaluate/results.json").read_text())
    assert "contamination" not in before["tasks"]["one"]
    capsys.readouterr()
    assert stage_main("evaluate", evaluate, [*copied, f"evaluate.task_folders=[{tmp_path}]", "evaluate.tasks=[one]",
                                             "evaluate.contamination=true"]) == 0
    told = capsys.readouterr().out
    assert told_of(told, "task one") == told_of(told, "held-out text") == "kept"
    assert told_of(told, "contamination") == "measured"
    results = json.loads((tmp_path / "copy/evaluate/results.json").read_text())
    parts = results["tasks"]["one"].pop("contamination")
    assert results == before, "nothing else changed"
    assert (parts["clean"]["items"], parts["dirty"]["items"], parts["too_short"]) == (3, 3, 0)
    whole = before["tasks"]["one"]["metrics"]["acc"]["value"]
    assert (parts["clean"]["metrics"]["acc"]["value"] + parts["dirty"]["metrics"]["acc"]["value"]) / 2 == \
        pytest.approx(whole, abs=1e-6)
    assert "### Contamination" in (tmp_path / "copy/evaluate/results.md").read_text()


def test_a_task_that_fails_takes_nothing_along(tasks, tmp_path, capsys):
    assert tasks("one", "broken", "two") == 2
    said = capsys.readouterr()
    assert "Traceback" not in said.err + said.out and "The task broken (" in said.err
    assert "kept (held-out text, continuations, task one, task two)" in said.err
    assert read_manifest(tmp_path / "copy/evaluate") is None
    assert "Traceback" in (tmp_path / "copy/evaluate/lm_eval.log").read_text()
    assert tasks("one", "two") == 0, "taken out without --force"
    told = capsys.readouterr().out
    assert {told_of(told, part) for part in ("held-out text", "continuations", "task one", "task two")} == {"kept"}


def test_a_task_that_is_mended_is_the_only_one_that_is_measured(tasks, tmp_path, capsys):
    assert tasks("one", "broken") == 2
    (tmp_path / "broken.jsonl").write_text((tmp_path / "one.jsonl").read_text())
    capsys.readouterr()
    assert tasks("one", "broken") == 0
    told = capsys.readouterr().out
    assert told_of(told, "task one") == "kept" and told_of(told, "task broken") == "measured"


def test_a_kill_costs_the_task_that_it_hit(tasks, capsys, monkeypatch):
    from pipeline.evaluation.running import TaskRunner
    original = TaskRunner.measure

    def measure(self, task_file):
        if task_file.name == "two":
            raise KeyboardInterrupt
        return original(self, task_file)
    monkeypatch.setattr(TaskRunner, "measure", measure)
    assert tasks("one", "two") == INTERRUPTED
    monkeypatch.undo()
    capsys.readouterr()
    assert tasks("one", "two") == 0
    told = capsys.readouterr().out
    assert [told_of(told, f"task {name}") for name in ("one", "two")] == ["kept", "measured"]


def test_a_task_whose_content_changed_is_refused(tasks, tmp_path, capsys):
    """What is renewed in silence is the list of tasks; what a finished one was made of is not."""
    assert tasks("one", "two") == 0
    (tmp_path / "one.jsonl").write_text((tmp_path / "two.jsonl").read_text())
    assert tasks("one") == 2
    assert "input file one/one.jsonl has other content" in capsys.readouterr().err
    assert read_manifest(tmp_path / "copy/evaluate").fingerprint["config"]["evaluate"]["tasks"] == ["one", "two"]
