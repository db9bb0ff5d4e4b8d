"""Models and checkpoints on the same items: the table, and what cannot be compared."""

import json
import math
import random
import shlex
import shutil

import pytest
from scipy import stats

from drover.pipeline.config.loading import load_config, save_config
from drover.pipeline.contract.manifest import Manifest
from drover.pipeline.core.console import draw
from drover.pipeline.core.files import output_record, read_json, write_json
from drover.pipeline.data.documents import Document, digest, document_key, to_json
from drover.pipeline.data.text_shards import write_members
from drover.pipeline.evaluation.scores import scored
from drover.pipeline.evaluation.selection import Suite, SuiteMember
from drover.pipeline.tokenization.conversion import byte_tokenizer
from drover.tools.compare import difference, interval, main, page_of, suite_rows
from tests.evaluation.task_pack import write_pack
from tests.evaluation.test_contamination import text_of
from tests.hub_server import hub  # noqa: F401 - a fixture
from tests.refusal import printed, table
from tests.tiny_models import for_tokenizer, write_huggingface, write_run

TOKENIZER = byte_tokenizer()
TEXTS = ["Ein Text, größer als der andere.", " ".join(text_of("long", 60)), "x", "x"]
STEPS = (2, 7)


def write_trained(folder, models, held=TEXTS):
    """A run with checkpoints, and with validation text."""
    run = write_run(folder, models, TOKENIZER)
    for step in models:
        marker = run / f"train/checkpoints/step-{step:08d}/COMPLETE.json"
        content = read_json(marker)
        content["progress"]["tokens"] = 1000 * step
        write_json(marker, content)
    records = []
    for number, text in enumerate(held):
        key = document_key(digest(text.encode()))
        write_members(run / f"shard/{number}.tar", [(key, to_json(Document(text, "s", key, {})))])
        records.append(output_record(run / "shard", run / f"shard/{number}.tar", split="validation", source="s", docs=1,
                                     text_bytes=len(text.encode())))
    Manifest("shard", {}, records, {}, "").write(run / "shard")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A run with two checkpoints and validation text, the second as an export, small tasks."""
    folder = tmp_path_factory.mktemp("home")
    models = {step: for_tokenizer(TOKENIZER, seed=step) for step in STEPS}
    write_trained(folder / "run", models)
    write_huggingface(folder / "hf", models[7], TOKENIZER)
    write_trained(folder / "empty", {}, [])
    shutil.copytree(folder / "hf", folder / "bare")
    (folder / "bare/tokenizer.json").unlink()
    write_pack(folder / "tasks")
    return folder


def compared(home, capsys, *arguments, expect=0):
    return printed(capsys, main, *arguments, "--task-folders", home / "tasks", "--batch", "4", expect=expect)


def test_models_of_any_form_are_compared_with_the_first(home, capsys, hub):  # noqa: F811
    """Scores and their errors are tested in tests/evaluation."""
    hub.push("someone/hf", home / "hf")
    models = [str(home / "run/train/checkpoints/step-00000002"), str(home / "run"), "someone/hf"]
    arguments = (*models, "--tasks", "capitals", "pages", "--validation", home / "run", "--limit", "2")
    results = json.loads(compared(home, capsys, *arguments, "--json"))
    by_score = {}
    for row in results["rows"]:
        by_score.setdefault((row["task"], row["metric"]), []).append(row)
    assert len(by_score) == 7
    for (_, metric), (first, second, export) in by_score.items():
        assert [first["model"], second["model"], export["model"]] == models and first["version"]
        assert (first["chance"] is None) == (not metric.startswith("acc"))
        assert "difference" not in first
        if metric.endswith("_perplexity"):
            continue  # has no difference
        assert second["low"] <= second["difference"] <= second["high"]
        assert second["difference"] == pytest.approx(second["value"] - first["value"], rel=1e-4, abs=2e-6)
        assert export["value"] == pytest.approx(second["value"], rel=1e-5), "the same weights in another form"
    draw(*page_of(results))
    lines = capsys.readouterr().out.splitlines()
    assert "capitals, acc (2 items, 0.3333 by chance, higher is better)" in lines
    assert "capitals, answer_bits_per_byte (2 items, lower is better)" in lines
    assert "capitals: 2 items are too few for the intervals, which need about 30" in results["notes"]
    assert [lines[1].split()[:2], lines[2].split()[0]] == [["model", "score"], models[0]]


@pytest.mark.parametrize(("arguments", "message"), table("""
    {home}/hf {home}/hf --tasks capitals -> Give each model once
    {home}/hf {home}/run -> nothing to measure
    {home}/hf {home}/tasks --tasks capitals -> {home}/tasks has no weights in a format that Drover knows
    {home}/hf {home}/bare --tasks capitals -> {home}/bare has weights but no tokenizer.json
    {home}/hf {home}/nope --tasks capitals -> {home}/nope is no folder
    {home}/hf {home}/run --tasks capitals --limit 0 -> --limit must be above 0
    {home}/hf {home}/run --tasks capitals --length 129 -> {home}/hf: Windows of 129 tokens are more
    {home}/hf {home}/run --validation {home}/empty -> has no validation text"""))
def test_what_cannot_be_compared_is_refused(home, arguments, message, capsys):
    output = compared(home, capsys, *shlex.split(arguments.format(home=home)), expect=2)
    assert message.format(home=home) in output
    assert ("measuring" in output) == ("--validation" in arguments), "refused before"


def test_own_tasks_of_the_runs_need_no_option(home, tmp_path, capsys):
    """And a folder that is gone hinders nobody."""
    shutil.copytree(home / "run", tmp_path / "run")
    settings = tmp_path / "run/config.yaml"
    save_config(load_config(settings, [f"evaluate.task_folders=[{home}/tasks, /nowhere]"]), settings)
    rows = json.loads(printed(capsys, main, tmp_path / "run", "--tasks", "capitals", "python_line", "--limit", "2",
                              "--json"))
    assert {row["task"] for row in rows["rows"]} == {"capitals", "python_line"}


def test_a_suite_has_a_paired_difference():
    """Its interval is that of the mean of the differences, which is narrower than the scores' errors."""
    chance = random.Random(1)

    def result(*metrics):
        items = {f"acc{number}": [(float(hit), 1.0) for hit in hits] for number, hits in enumerate(metrics)}
        return {"metrics": {name: scored(own) for name, own in items.items()}, "per_item": {"metrics": items},
                "items": 400, "chance": 0.25, "answer_bits_per_byte": None}
    hard = {name: [chance.random() for _ in range(400)] for name in "xyz"}
    first, second = ({name: result([value < level for value in values]) for name, values in hard.items()}
                     for level in (0.5, 0.6))
    members = SuiteMember("x", ("x",), "acc0", None), SuiteMember("both", ("y", "z"), "acc0", 0.5)
    suite = Suite("pack", members, {}, centred=True)
    one, other = suite_rows({"one": first, "other": second}, [suite])
    assert "difference" not in one and (other["n"], other["chance"], other["metric"]) == (1200, 0.0, "score")
    x, y, z = (difference(first[name]["per_item"]["metrics"]["acc0"], second[name]["per_item"]["metrics"]["acc0"])
               for name in hard)
    assert other["difference"] == pytest.approx(other["value"] - one["value"])
    assert other["difference"] == pytest.approx((x["value"] / 0.75 + (y["value"] + z["value"]) / 2 / 0.5) / 2)
    error = math.hypot(x["stderr"] / 0.75, math.hypot(y["stderr"], z["stderr"]) / 2 / 0.5) / 2
    assert other["high"] - other["low"] == pytest.approx(2 * 1.96 * error)
    assert error < math.hypot(one["stderr"], other["stderr"]) / 1.5


def test_a_page_leaves_out_what_folders_have_in_common(capsys):
    common = {"task": "t", "metric": "perplexity", "n": 40, "chance": None, "higher_is_better": False, "stderr": 3.0}
    scores = [{**common, "model": f"runs/a/checkpoints/step-{step}", "value": 6095151562.4} for step in (1, 2)]
    draw(*page_of({"models": {row["model"]: "" for row in scores}, "rows": scores, "notes": []}))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "models in runs/a/checkpoints/" and lines[4].split() == ["step-1", "6.1e+09", "3.0000"]


def ratio(items):
    return sum(value for value, _ in items) / sum(weight for _, weight in items)


def test_ratios_are_paired():
    """Of items of very different weight: the interval is what redrawing them, for both, shows."""
    chance = random.Random(3)
    first = [(size * chance.uniform(1, 2), float(size)) for size in (chance.randint(5, 80) for _ in range(300))]
    second = [(nats - size * chance.gauss(0.02, 0.1), size) for nats, size in first]
    alone, result = scored(first), interval(difference(first, second))
    assert alone["value"] == pytest.approx(ratio(first))
    assert result["difference"] == pytest.approx(ratio(second) - ratio(first)) and result["difference"] < 0
    draws = [ratio([second[place] for place in places]) - ratio([first[place] for place in places])
             for places in (chance.choices(range(300), k=300) for _ in range(1000))]
    assert result["high"] - result["low"] == pytest.approx(2 * 1.96 * stats.tstd(draws), rel=0.1)
    assert result["high"] - result["low"] < 2 * 1.96 * alone["stderr"] / 2, "what both find hard does not count"


@pytest.mark.parametrize(("first", "second", "expected"), table("""
    [null] -> [[1, 1]] -> [NaN, null, null]
    [[1, 2], null, [3, 4]] -> [[2, 2], [9, 1], null] -> [0.5, null, null]
    [[1, 1], [1, 1], [1, 1]] -> [[1, 1], [1, 1], [1, 1]] -> [0, 0, 0]""", json.loads, json.loads, json.loads))
def test_items_without_a_value_are_left_out_of_both(first, second, expected):
    result = interval(difference(first, second))
    assert [result["difference"], result["low"], result["high"]] == pytest.approx(expected, nan_ok=True)
