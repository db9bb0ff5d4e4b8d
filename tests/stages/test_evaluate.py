"""The stage evaluate on a small run: text through the real first stages, a model of random weights."""

import gzip
import lzma
import math
import re

import pytest

from drover.launch.plan import Options, plan
from drover.launch.submit import run as launched
from drover.pipeline.config.loading import load_config, save_config
from drover.pipeline.contract.entry import INTERRUPTED
from drover.pipeline.contract.manifest import read_manifest
from drover.pipeline.contract.run import Run
from drover.pipeline.core.files import read_json, read_lines
from drover.pipeline.watch import main as score_checkpoints
from drover.tools.tasks import main as fetch_tasks
from tests.conftest import run_stage, slow
from tests.evaluation.made_data import KINDS, push
from tests.hub_server import hub  # noqa: F401 - a fixture
from tests.stages.here import run_here
from tests.stages.small_run import item, kept_parts, write_task
from tests.stages.test_shard import documents
from tests.stages.training import manifest_of
from tests.training.test_sinks import board_of, points


@pytest.fixture(scope="module")
def evaluated(small_run):
    """Results of a single process: (folder, results)."""
    assert run_here("evaluate", small_run) == 0
    folder = small_run.parent / "runs/small/evaluate"
    return folder, read_json(folder / "results.json")


def test_what_is_measured(small_run, evaluated):
    _, results = evaluated
    held = results["validation"]
    for source in ("code", "prose"):
        texts = [document.text.encode() for document in documents(small_run, "validation", "small")
                 if document.source == source]
        entry = held["sources"][source]
        assert (entry["documents"], entry["bytes"]) == (len(texts), sum(map(len, texts)))
        for name, compressed in (("gzip -9", gzip.compress(b"".join(texts), 9)),
                                 ("xz -9", lzma.compress(b"".join(texts), preset=9))):
            assert entry["baselines"][name] == pytest.approx(8 * len(compressed) / entry["bytes"], abs=1e-6)
    assert results["tasks"]["words"]["items"] == 7
    board = board_of(small_run.parent / "runs/small")
    for curve, value in (("bits_per_byte", held["overall"]["bits_per_byte"]),
                         ("bits_per_byte/code", held["sources"]["code"]["bits_per_byte"]),
                         ("tasks/words/acc", results["tasks"]["words"]["metrics"]["acc"]["value"])):
        assert points(board, f"validation/{curve}") == [(3, pytest.approx(value))]
    assert [entry["prompt"] for entry in results["continuations"]] == ["def ", "x"]


def test_a_part_of_the_validation_text_is_measured_and_said(run, evaluated, copied, tmp_path):
    """Another amount costs the figures of validation text only, and is asked for without --force; so are other
    settings, each of which costs what it decides."""
    limit, folder = 200, tmp_path / "copy/evaluate"
    run("evaluate", *copied, "evaluate.validation_tokens=null")
    assert read_json(folder / "results.json") == evaluated[1], "the default takes all of so little"
    output = run("evaluate", *copied, f"evaluate.validation_tokens={limit}", "evaluate.compressed_mb=0.0001").out
    assert kept_parts(output, "validation text", "baselines", "task words", "continuations") == [
        "measured", "measured", "kept", "kept"]
    output = run("evaluate", *copied, f"evaluate.validation_tokens={limit}", "evaluate.compressed_mb=0.0001",
                 "evaluate.task_limit=5", "evaluate.prompt_tokens=5").out
    assert "changed: evaluate.task_limit: not set -> 5" in output
    assert kept_parts(output, "validation text", "baselines", "task words", "continuations") == [
        "kept", "kept", "measured", "measured"]
    results = read_json(folder / "results.json")["validation"]
    assert "{documents} of {of_documents} validation documents ({tokens} of".format(**results["overall"]) in output
    for source, entry in results["sources"].items():
        complete = evaluated[1]["validation"]["sources"][source]
        assert entry["documents"] < entry["of_documents"] == complete["documents"]
        assert limit <= entry["tokens"] < entry["of_tokens"]
        assert 50 <= entry["compressed_bytes"] < entry["bytes"] and entry["baselines"] != complete["baselines"]


@pytest.mark.parametrize("shards", [*slow(1), 2])
def test_two_ranks_write_the_same_bytes(small_run, evaluated, shards):
    """Also where neither holds the model: nothing but memory depends on that."""
    folder, results = evaluated
    alone = [(folder / name).read_bytes() for name in ("results.json", "documents.jsonl")]
    documents = list(read_lines(folder / "documents.jsonl"))
    assert math.fsum(one["nats"] for one in documents) == pytest.approx(
        results["validation"]["overall"]["nats"], abs=1e-4)
    assert len({one["key"] for one in documents}) == results["validation"]["overall"]["documents"]
    output = run_stage("evaluate", small_run, "--force", f"evaluate.dp_shard={shards}",
                     ranks=2).stdout
    assert [(folder / name).read_bytes() for name in ("results.json", "documents.jsonl")] == alone
    counts = manifest_of(small_run, "evaluate", "small").counts
    assert (counts["ranks"], counts["dp_shard"]) == (2, shards)
    assert ("weights sharded over 2 ranks (FSDP2" in output) == (shards == 2)


def test_prompts_are_beginnings_of_the_text_and_one_beyond_the_context_is_refused(run, copied, tmp_path):
    override = f"evaluate.prompts=['{'x' * 70}']"
    assert "leaves no room in the model's context of 64" in run("evaluate", *copied, override, expect=2).err
    run("evaluate", *copied, "evaluate.prompts=null", "evaluate.tasks=[]")
    texts = [" ".join(document.text.split()) for document in documents(copied[0], "validation", "small")]
    made = read_json(tmp_path / "copy/evaluate/results.json")["continuations"]
    assert len(made) == 2 and all(any(text.startswith(one["prompt"]) for text in texts) for one in made)


@pytest.fixture
def tasks(run, copied, tmp_path):
    """Function: run the stage of a run of its own with these tasks, to this exit status; they are `one`, `two` and
    `broken`. What it said."""
    for name, gold in (("one", 0), ("two", 1), ("broken", ["yes", "no"])):
        write_task(tmp_path, name, *(item(number, gold) for number in range(4)))

    def run_tasks(*names, more=(), stage="evaluate", expect=0):
        return run(stage, *copied, f"evaluate.task_folders=[{tmp_path}]", f"evaluate.tasks=[{', '.join(names)}]", *more,
                   expect=expect)
    return run_tasks


@pytest.fixture
def results(tmp_path):
    """Function: what was measured last."""
    return lambda: read_json(tmp_path / "copy/evaluate/results.json")


def test_items_in_the_training_text_are_told_apart(tasks, results, copied, tmp_path):
    """Turned on for a finished stage it costs one pass over the text; every other item stands there, without the words
    of the task's template."""
    texts = [document.text for document in documents(copied[0], "train", "small") if document.source == "prose"]
    items = [{"query": " ".join(text.split()[:10]).upper() if number % 2 else f"Nobody wrote item {number} so far:",
              "choices": ["So it goes.", "no"], "gold": 0} for number, text in enumerate(texts[:6])]
    write_task(tmp_path, "one", *items)
    (tmp_path / "one.yaml").write_text((tmp_path / "one.yaml").read_text().replace(
        "{{query}}", "Question: {{query}} What do you think comes next here?"))
    tasks("one")
    before = results()
    output = tasks("one", more=["evaluate.contamination=true"]).out
    assert kept_parts(output, "task one", "validation text", "contamination") == [
        "kept", "kept", "measured"]
    assert "one: of 6 items, in the training text: 3, too short to judge: 0, not in it: 3 (acc " in output
    after = results()
    parts = after["tasks"]["one"].pop("contamination")
    assert after == before, "nothing else changed"
    assert (parts["clean"]["items"], parts["dirty"]["items"], parts["too_short"]) == (3, 3, 0)


def test_a_task_that_fails_takes_nothing_along_and_other_tasks_cost_only_themselves(tasks, results, tmp_path):
    """It may be taken out without --force, or repaired: then it alone is measured. The report follows."""
    failed = tasks("one", "broken", "two", expect=2)
    assert "Traceback" not in failed.out and "The task broken (" in failed.err
    assert "kept (validation text, continuations, task one, task two)" in failed.err
    assert read_manifest(tmp_path / "copy/evaluate") is None
    (tmp_path / "broken.jsonl").write_text((tmp_path / "one.jsonl").read_text())
    tasks("one", "two")
    tasks("one", "two", stage="report")
    changed = load_config(tmp_path / "copy/config.yaml", ["evaluate.tasks=[broken, one]"])
    jobs = plan(changed, Run(changed), ["evaluate", "report"], Options("slurm", "c.yaml"))
    assert [(job.stage, job.state.kind) for job in jobs] == [("evaluate", "resumable"), ("report", "absent")]
    first = results()
    for names, new, how in ((["broken", "one"], "broken", "measured"), (["one", "two"], "two", "kept")):
        output = tasks(*names).out
        assert list(results()["tasks"]) == names
        assert kept_parts(output, "validation text", "continuations", "task one", f"task {new}") == [
            "kept", "kept", "kept", how]
        assert "changed: evaluate.tasks.0" in output and f"changed: input file {new}/{new}.yaml is new" in output
    assert results() == first


def test_a_kill_costs_the_task_that_it_hit_and_other_code_all_and_another_task_is_refused(tasks, tmp_path, monkeypatch):
    """What is renewed in silence is the list of tasks; what a finished one was made of is not. And were results of
    other code kept, the manifest would name code that did not make them."""
    from drover.pipeline.evaluation import harness
    original = harness.measure_task

    def measure(model, task_file, *how):
        if task_file.name == "two":
            raise KeyboardInterrupt
        return original(model, task_file, *how)
    with monkeypatch.context() as patch:
        patch.setattr(harness, "measure_task", measure)
        tasks("one", "two", expect=INTERRUPTED)
    parts = ("validation text", "task one", "task two")
    output = tasks("one", "two").out
    assert kept_parts(output, *parts) == ["kept", "kept", "measured"]
    with monkeypatch.context() as patch:
        patch.setattr("drover.pipeline.contract.run.code_hashes", lambda stage: {"evaluate.py": "another"})
        output = tasks("two", "one").out
    assert kept_parts(output, *parts) == ["measured"] * 3
    (tmp_path / "one.jsonl").write_text((tmp_path / "two.jsonl").read_text())
    assert "input file one/one.jsonl has other content" in tasks("one", expect=2).err
    assert read_manifest(tmp_path / "copy/evaluate").fingerprint["config"]["evaluate"]["tasks"] == ["two", "one"]


def test_the_harnesss_own_tasks_are_measured_from_fetched_data_only(run, copied, results, hub, tmp_path, capsys):  # noqa: F811
    """Refused before a stage starts, with the command; then as any other task, and the manifest has the hashes."""
    data = tmp_path / "task_data"
    chosen = [*copied, "evaluate.tasks=[piqa_2shot, words]", f"evaluate.task_data={data}"]
    command = f"drover tasks fetch piqa_2shot --data {data}"
    assert launched([str(copied[0]), *chosen[1:], "--stage", "evaluate", "--cluster", "local"]) == 2
    assert command in capsys.readouterr().err
    assert command in run("evaluate", *chosen, expect=2).err
    commit, = push(hub, tmp_path / "made", "baber/piqa").values()
    assert fetch_tasks(["fetch", "piqa_2shot", "--data", str(data)]) == 0
    run("evaluate", *chosen)
    piqa = results()["tasks"]["piqa_2shot"]
    assert piqa["data"] == f"baber/piqa@{commit}" and piqa["few_shot"] == 2 and piqa["items"] == 8
    assert piqa["metrics"]["acc"]["stderr"] is not None and piqa["answer_bits_stderr"] > 0 and piqa["chance"] == 0.5
    files = read_manifest(tmp_path / "copy/evaluate").fingerprint["files"]
    assert "piqa_2shot/baber/piqa/data/validation.jsonl" in files
    run("report", *chosen)
    assert f"baber/piqa@{commit}" in (tmp_path / "copy/report/report.html").read_text()
    changed = data / "baber/piqa" / commit / "data/validation.jsonl"
    changed.write_text(changed.read_text().replace("1", "0", 1))
    assert "is not what was written" in run("evaluate", *chosen, "--force", expect=2).err


@pytest.mark.slow
def test_a_suite_has_one_score(run, copied, results, hub, tmp_path):  # noqa: F811
    data = tmp_path / "task_data"
    push(hub, tmp_path / "made", *KINDS, items=12)
    assert fetch_tasks(["fetch", "core", "--data", str(data)]) == 0
    chosen = [*copied, "evaluate.tasks=[core]", f"evaluate.task_data={data}", "evaluate.bootstrap_iters=20",
              "evaluate.task_limit=4"]
    output = run("evaluate", *chosen).out
    assert re.search(r"core: -?0\.\d+ ± 0\.\d+ \(mean of 19 of 22 tasks, chance subtracted, chance 0\.000; "
                     r"not measured: jeopardy, coqa, squad\), answers \d", output)
    suite = results()["suites"]["core"]
    assert len(suite["members"]) == 19 and suite["value"] < 0.5 and suite["stderr"] > 0
    save_config(load_config(copied[0], [*chosen[1:], "evaluate.every=3", "train.checkpoint.every_steps=3"]),
                tmp_path / "copy/config.yaml")
    assert score_checkpoints([str(tmp_path / "copy")]) == 0
    assert read_json(tmp_path / "copy/train/scores/step-00000003.json")["suites"]["core"] == suite
    run("report", *chosen)
    page = (tmp_path / "copy/report/report.html").read_text()
    assert "19 of 22" in page and "core, score" in page
