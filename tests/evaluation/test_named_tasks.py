"""The harness's own tasks by name: what names mean, what is fetched and refused, and figures that equal hf's."""

import json
import math
import os
from pathlib import Path

import pytest
import yaml
from huggingface_hub import constants
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager

from drover.pipeline.core.console import readable
from drover.pipeline.core.errors import UserError
from drover.pipeline.evaluation.aggregates import aggregated
from drover.pipeline.evaluation.harness import HarnessModel, measure_task
from drover.pipeline.evaluation.harness_names import harness_names
from drover.pipeline.evaluation.selection import Selection
from drover.tools.tasks import main
from tests.evaluation.made_data import KINDS, MMLU, push, write_dataset
from tests.evaluation.test_harness import VOCABULARY, opened
from tests.hub_server import hub  # noqa: F401 - a fixture
from tests.refusal import refused
from tests.tiny_models import for_tokenizer, write_huggingface


def chosen(data, *names):
    return Selection([], data, "--tasks").add(names)


def fetch(data, *names):
    """The exit status of the command in this process. A command before it may have set the Hub libraries offline."""
    constants.HF_HUB_OFFLINE = False
    return main(["fetch", *names, "--data", str(data)])


@pytest.mark.slow  # the harness's own index takes half a minute
def test_every_name_means_what_it_means_in_the_harness():
    theirs = TaskManager().task_index
    ours = harness_names()
    assert {name: (entry.yaml_path, entry.tags if entry.yaml_path is None else set())
            for name, entry in theirs.items()} == {
                name: (known.path, set(known.tasks)) for name, known in ours.items()}


def test_groups_and_tags_are_resolved_to_their_tasks(tmp_path):
    mmlu = chosen(tmp_path, "mmlu")
    assert len(mmlu.tasks) == 57 and mmlu.groups["mmlu"].tasks == tuple(mmlu.tasks)
    assert len(mmlu.groups["mmlu_stem"].tasks) == 19 and len(mmlu.groups) == 5
    nested = chosen(tmp_path, "mmlu_continuation_5shot")
    assert "mmlu_anatomy_continuation_5shot" in nested.groups["mmlu_continuation::stem_5shot"].tasks
    assert {task.settings["num_fewshot"] for task in nested.tasks.values()} == {5}
    assert set(chosen(tmp_path, "ai2_arc").tasks) == {"arc_easy", "arc_challenge"}
    refused(UserError, r"--tasks names helaswag, but .* did you mean 'hellaswag'\?", chosen, tmp_path, "helaswag")
    refused(UserError, "squad_completion, which the harness defines as a Python class", chosen, tmp_path,
            "squad_completion")


def inputs_of(data):
    return {name: path.read_bytes() for name, path in chosen(data, "arc_easy").tasks["arc_easy"].inputs()}


def test_fetched_once_pinned_copied_and_checked(hub, tmp_path, capsys):  # noqa: F811
    """Only the named configurations, at one commit; a second fetch asks nobody; a copy works; a change is refused."""
    data = tmp_path / "task_data"
    commits = push(hub, tmp_path, "allenai/ai2_arc", "hails/agieval-lsat-ar")
    refused(UserError, f"whose data is not in {data}.* give: drover tasks fetch arc_easy_3shot agieval_lsat_ar "
            f"--data {data}$", chosen(data, "arc_easy_3shot", "agieval_lsat_ar").fetched)
    assert fetch(data, "arc_easy_3shot", "agieval_lsat_ar") == 0
    said = capsys.readouterr().out
    assert f"arc_easy_3shot: 8 items of allenai/ai2_arc@{commits['allenai/ai2_arc'][:12]}" in said
    assert not any("Challenge" in path for _, path in hub.seen)
    before = inputs_of(data)
    write_dataset(tmp_path / "allenai/ai2_arc", KINDS["allenai/ai2_arc"], 5)
    moved = hub.push("datasets/allenai/ai2_arc", tmp_path / "allenai/ai2_arc")
    assert fetch(data, "arc_challenge") == 0, "at the commit of the first time"
    assert inputs_of(data) == before, "what was measured stays up to date"
    hub.off = True
    capsys.readouterr()
    assert fetch(data, "ai2_arc", "agieval_lsat_ar") == 0 and capsys.readouterr().out == "", "nothing to do"
    copied = tmp_path / "elsewhere"
    data.rename(copied)
    assert not any(str(tmp_path).encode() in path.read_bytes() for path in copied.rglob("*") if path.is_file())
    task = chosen(copied, "arc_easy").fetched().tasks["arc_easy"]
    assert moved not in task.source and task.source == f"allenai/ai2_arc@{commits['allenai/ai2_arc']}"
    names = dict(task.inputs())
    assert {"arc_easy/arc_easy.yaml", "arc_easy/allenai/ai2_arc/ARC-Easy/test.jsonl"} <= names.keys()
    assert not [*task.problems()]
    changed = names["arc_easy/allenai/ai2_arc/ARC-Easy/test.jsonl"]
    changed.write_bytes(changed.read_bytes().replace(b"A", b"B", 1))
    problem, = chosen(copied, "arc_easy").tasks["arc_easy"].problems()
    assert "ARC-Easy/test.jsonl is not what was written" in problem and "drover tasks fetch arc_easy" in problem


def test_the_list_shows_what_is_there(hub, tmp_path, capsys):  # noqa: F811
    commit, = push(hub, tmp_path, "baber/piqa").values()
    assert fetch(tmp_path / "data", "piqa") == 0
    capsys.readouterr()
    files = (tmp_path / "baber/piqa").rglob("*.jsonl")
    assert main(["list", "piqa_5shot", "hellaswag", "--json", "--data", str(tmp_path / "data")]) == 0
    assert json.loads(capsys.readouterr().out) == [
        {"task": "piqa_5shot", "metrics": "acc, acc_norm", "items": 8, "chance": 0.5,
         "size": readable(sum(path.stat().st_size for path in files)), "data set": f"baber/piqa@{commit[:12]}"},
        {"task": "hellaswag", "metrics": "", "items": None, "chance": None, "size": "not fetched",
         "data set": "Rowan/hellaswag"}]
    assert main(["list", "--data", str(tmp_path / "data")]) == 0
    said = capsys.readouterr().out
    assert "piqa" in said and "core: 1 of 19 tasks fetched (drover tasks fetch core)" in said


def test_what_cannot_be_fetched_is_named_and_the_others_are_there(hub, tmp_path, capsys):  # noqa: F811
    """A data set that is only code, one that is not there, one that lacks what the task reads."""
    push(hub, tmp_path, "baber/piqa")
    (tmp_path / "code").mkdir()
    (tmp_path / "code/hellaswag.py").write_text("raise SystemExit('this was run')\n")
    (tmp_path / "code/README.md").write_text("# code\n")
    hub.push("datasets/Rowan/hellaswag", tmp_path / "code")
    hub.push("datasets/lighteval/siqa", write_dataset(tmp_path / "siqa", {"": ("train", lambda _: {"x": 1})}))
    assert fetch(tmp_path / "data", "hellaswag", "piqa", "openbookqa", "social_iqa") == 2
    said = capsys.readouterr().err
    assert "Rowan/hellaswag cannot be read" in said and "Leave out hellaswag" in said
    assert "allenai/openbookqa: the Hub refuses it" in said
    assert "The task social_iqa cannot be loaded" in said
    assert chosen(tmp_path / "data", "piqa").fetched() and not [*(tmp_path / "data").rglob("*.py")]
    refused(UserError, "names hellaswag, whose data", chosen(tmp_path / "data", "hellaswag", "piqa").fetched)


@pytest.fixture(scope="module")
def export(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export") / "hf"
    write_huggingface(folder, for_tokenizer(VOCABULARY, seed=7, context_length=768), VOCABULARY)
    return folder


def figures_equal_hf(names, data, export, made, limit=None, left_out=()):
    """Every figure of ours against those of `hf`, which reads the made data sets themselves."""
    tasks = {name: task for name, task in chosen(data, *names).fetched().tasks.items() if name not in left_out}
    own = made.parent / "yaml"
    own.mkdir(exist_ok=True)
    for name, task in tasks.items():
        (own / f"{name}.yaml").write_text(yaml.safe_dump({
            "include": str(task.path), **task.overrides, "task": name, "dataset_path": str(made / task.dataset),
            "dataset_kwargs": {"cache_dir": str(made.parent / "cache")}}))  # whose key is not the content
    theirs = simple_evaluate(
        model="hf", tasks=[*tasks], device="cpu", bootstrap_iters=20, log_samples=False, limit=limit,
        task_manager=TaskManager(include_path=str(own), include_defaults=False),
        model_args={"pretrained": str(export), "dtype": "float32"})["results"]
    model = HarnessModel(opened(export), batch=4)
    for name, task in tasks.items():
        result = measure_task(model, task, limit, 20, Path(os.devnull))
        assert result["data"] == task.source and result["metrics"], name
        for metric, entry in result["metrics"].items():
            value, error = (theirs[name][f"{metric}{of},none"] for of in ("", "_stderr"))
            assert entry["value"] == pytest.approx(value, rel=1e-5), (name, metric)
            assert entry["stderr"] == (pytest.approx(error, rel=1e-3) if isinstance(error, float) else None), metric


def test_one_task_of_each_output_type_equals_hf(hub, tmp_path, export):  # noqa: F811
    names = ["hellaswag", "arc_easy_3shot", "lambada_openai", "bigbench_operators_generate_until_2shot"]
    push(hub, tmp_path / "made", "Rowan/hellaswag", "allenai/ai2_arc", "EleutherAI/lambada_openai", "hails/bigbench")
    assert fetch(tmp_path / "data", *names) == 0
    figures_equal_hf(names, tmp_path / "data", export, tmp_path / "made")


SUITES = {"core": 19, "olmes": 10}


@pytest.mark.slow
def test_every_task_of_the_suites_equals_hf(hub, tmp_path, export, monkeypatch):  # noqa: F811
    """Only three of MMLU's subjects are compared: they differ in nothing but their names."""
    suites = chosen(tmp_path / "data", *SUITES)
    subjects = {name: task.configuration for name, task in suites.tasks.items() if task.dataset == "cais/mmlu"}
    monkeypatch.setitem(KINDS, "cais/mmlu", dict.fromkeys(subjects.values(), MMLU))
    push(hub, tmp_path / "made", *KINDS.keys() - {"cais/mmlu"}, items=12)
    push(hub, tmp_path / "made", "cais/mmlu", items=6)
    assert fetch(tmp_path / "data", *SUITES) == 0
    assert len(suites.tasks) == 28 + 57 and len(subjects) == 57
    figures_equal_hf(SUITES, tmp_path / "data", export, tmp_path / "made", limit=3, left_out=[*subjects][3:])


def result_of(metrics, items=10, chance=0.25):
    return {"metrics": {name: {"value": value, "stderr": error} for name, (value, error) in metrics.items()},
            "items": items, "chance": chance, "answer_bits_per_byte": 2.0}


def test_a_groups_score_is_the_harnesss_and_a_suites_the_centred_mean(tmp_path):
    selection = chosen(tmp_path, "mmlu_stem", "core", "olmes")
    assert {name: len(suite.members) for name, suite in selection.suites.items()} == SUITES
    metrics = dict.fromkeys(("acc", "acc_norm", "acc_mutual_info", "exact_match", "em"), (0.5, 0.1))
    tasks = {name: result_of(metrics) for name in selection.tasks}
    stem = selection.groups["mmlu_stem"].tasks
    tasks[stem[0]] = result_of({"acc": (0.9, 0.2)}, items=100)
    made = aggregated(selection, tasks)
    acc = made["groups"]["mmlu_stem"]["metrics"]["acc"]
    assert acc["value"] == pytest.approx((0.9 * 100 + 0.5 * 10 * 18) / 280)
    variance = (99 * 0.2**2 * 100 + 18 * 9 * 0.1**2 * 10) / (280 - 19)
    assert acc["stderr"] == pytest.approx(math.sqrt(variance / 280))
    chances = [member.chance for member in selection.suites["core"].members]
    core = made["suites"]["core"]
    assert core["value"] == pytest.approx(sum((0.5 - chance) / (1 - chance) for chance in chances) / 19)
    assert core["stderr"] == pytest.approx(math.hypot(*(0.1 / (1 - chance) for chance in chances)) / 19)
    assert core["of"] == 22 and core["lacking"].keys() == {"jeopardy", "coqa", "squad"}
    assert core["answer_bits_per_byte"] == 2
    olmes = made["suites"]["olmes"]
    assert olmes["value"] == pytest.approx(0.5) and olmes["of"] == 10 and olmes["chance"] == pytest.approx(0.25)
    assert olmes["members"]["mmlu_continuation_5shot"]["stderr"] == pytest.approx(0.1 / math.sqrt(57))
    tasks["copa_0shot"] = result_of({})
    assert aggregated(selection, tasks)["suites"]["core"]["value"] is None, "a member without a value is not left out"
