"""Models and a run's checkpoints on the same items: the table, what differs, the plot, going on after a kill."""

import shlex
from itertools import combinations

import pytest

from drover.pipeline.core.files import Ledger, read_json, write_json
from drover.pipeline.evaluation import running
from drover.pipeline.tokenization.simple import ByteTokenizer
from drover.tools.compare import main
from tests.evaluation.test_contamination import corpus, text_of
from tests.evaluation.test_task_packs import write_pack
from tests.refusal import table
from tests.tiny_models import for_tokenizer, write_huggingface, write_run

TOKENIZER = ByteTokenizer()
TEXTS = ["Ein Text, größer als der andere.", " ".join(text_of("long", 60)), "x"]
STEPS = (2, 7)


def write_trained(folder, models, held=TEXTS):
    """A run with checkpoints after some tokens, and with validation text."""
    run = write_run(folder, models, TOKENIZER)
    for step in models:
        marker = run / f"train/checkpoints/step-{step:08d}/COMPLETE.json"
        content = read_json(marker)
        content["progress"]["tokens"] = 1000 * step
        write_json(marker, content)
    stage, manifest = corpus(run / "shard", [[text_of("train", 20)]], held=held)
    manifest.write(stage)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A run with two checkpoints and validation text, the second as an export, small tasks."""
    folder = tmp_path_factory.mktemp("home")
    models = {step: for_tokenizer(TOKENIZER, seed=step) for step in STEPS}
    write_trained(folder / "run", models)
    write_huggingface(folder / "hf", models[7], TOKENIZER)
    write_trained(folder / "empty", {}, [])
    write_pack(folder / "tasks")
    return folder


def compared(home, to, *arguments, expect=0):
    assert main([*arguments, "--to", str(to), "--task-folders", str(home / "tasks"), "--bootstrap-iters", "20",
                 "--batch", "4"]) == expect
    return read_json(to / "comparison.json") if not expect else None


@pytest.fixture(scope="module")
def over_time(home):
    to = home / "over_time"
    return to, compared(home, to, "--checkpoints", str(home / "run"), "--tasks", "capitals", "pages", "--validation",
                        str(home / "run"))


def row(results, part="scores", **wanted):
    found, = (row for row in results[part] if wanted.items() <= row.items())
    return found


def test_each_checkpoint_is_compared_with_the_one_before(over_time):
    """Scores and their errors are tested in tests/evaluation."""
    _, results = over_time
    for found in results["scores"]:
        assert found["version"] and found["stderr"] >= 0 and found["tokens"] == 1000 * int(found["model"][-1])
        assert (found["chance"] is None) == (not found["metric"].startswith("acc"))
    assert len(results["differences"]) == len(results["scores"]) / 2 == 7
    for apart in results["differences"]:
        first, second = (row(results, model=f"step-{step:08d}", task=apart["task"], metric=apart["metric"])
                         for step in STEPS)
        assert apart == {**apart, "first": first["model"], "second": second["model"], "items": first["n"],
                         "difference": pytest.approx(second["value"] - first["value"], rel=1e-6)}


@pytest.mark.slow
def test_again_nothing_is_measured_and_a_kill_costs_one_part(over_time, home, monkeypatch):
    to, results = over_time
    measured, original = [], running.measure_task

    def measure(model, task_file, *how):
        measured.append(task_file.name)
        if len(measured) == 2:
            raise KeyboardInterrupt
        return original(model, task_file, *how)

    def again(*more, expect=0):
        return compared(home, to, "--checkpoints", str(home / "run"), "--tasks", "capitals", "pages", "--validation",
                        str(home / "run"), *more, expect=expect)
    monkeypatch.setattr(running, "measure_task", measure)
    assert again() == results and not measured
    ledger = Ledger(to / "items")
    for name, key, _ in [*ledger.lines()]:
        if "pages" in name:
            ledger.add(name, key, None)
    again(expect=130)
    assert again() == results and measured == ["pages"] * 3, "one, the kill, the other"
    again("--limit", "2")
    assert measured[3:] == ["capitals", "pages"] * 2, "other conditions are measured again"


@pytest.mark.slow
def test_models_of_any_form_in_one_table(home, capsys):
    to, models = home / "models", [str(home / name) for name in (
        "run", "run/train/checkpoints/step-00000002", "hf")]
    results = compared(home, to, "--models", *models, "--tasks", "capitals")
    assert [(row["first"], row["second"]) for row in results["differences"] if row["metric"] == "acc"] == list(
        combinations(models, 2))
    alike = row(results, "differences", first=models[0], second=models[2], metric="answer_bits_per_byte")
    assert alike["difference"] == pytest.approx(0, abs=1e-6)
    assert f"| {models[2]} |" in (to / "comparison.md").read_text() and models[2] in capsys.readouterr().out


@pytest.mark.parametrize(("arguments", "message"), table("""
    --models {home}/hf {home}/hf --tasks capitals -> twice
    --models {home}/hf -> nothing to measure
    --models {home}/hf --tasks capitals --limit 0 -> --limit must be above 0
    --models {home}/hf --tasks capitals --length 129 -> {home}/hf: Windows of 129 tokens are more
    --models {home}/hf --validation {home}/empty -> has no validation text
    --checkpoints {home}/hf --tasks capitals -> There is no run"""))
def test_what_cannot_be_compared_is_said(home, arguments, message, capsys, tmp_path):
    compared(home, tmp_path, *shlex.split(arguments.format(home=home)), expect=2)
    assert message.format(home=home) in capsys.readouterr().err
