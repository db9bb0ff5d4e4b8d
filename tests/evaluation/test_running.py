"""What is printed with the scores of tasks. test_named_tasks.py compares the scores with the harness."""

import json
import os
import shutil
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from drover.pipeline.config.tree import Config, EvaluateConfig
from drover.pipeline.core.errors import UserError
from drover.pipeline.evaluation.harness import HarnessModel, measure_task
from drover.pipeline.evaluation.items import right_choices
from drover.pipeline.evaluation.results import doubts
from drover.pipeline.evaluation.selection import chosen_tasks
from tests.data.source_files import write_jsonl
from tests.evaluation.test_harness import VOCABULARY, harness
from tests.refusal import refused, table
from tests.tiny_models import for_tokenizer

ITERS = 40
"""Bootstrap draws: enough that another number of them, or another seed, gives another standard error."""
NAMES = ["Ann", "Bob", "the cat", "my hat", "a tree", "the sea", "him", "her"]

TASKS = {
    # A context for each choice, one ending for all: the Winograd pattern. doc_to_text is the number of the right one.
    "winograd": {
        "items": [{"first": f"{NAMES[n]} saw {NAMES[n - 1]} as {NAMES[n]}", "label": n % 2,
                   "second": f"{NAMES[n]} saw {NAMES[n - 1]} as {NAMES[n - 1]}", "ending": f"was {n} miles away"}
                  for n in range(8)],
        "yaml": """
output_type: multiple_choice
doc_to_text: label
doc_to_choice: "{{[first, second]}}"
doc_to_target: ending
metric_list: [{metric: acc}, {metric: acc_norm}, {metric: f1}]
"""},
    # Targets that are text; two of the eight are none of the choices. Two examples before each question.
    "named": {
        "items": [{"query": f"{name} is", "choices": ["here", "far away", "not"],
                   "gold": ["here", "not", "far away", "lost"][n % 4]} for n, name in enumerate(NAMES)],
        "yaml": """
output_type: multiple_choice
doc_to_text: query
doc_to_choice: choices
doc_to_target: gold
num_fewshot: 2
metric_list: [{metric: acc}, {metric: acc_norm}, {metric: acc_bytes}]
"""},
    "last_word": {
        "items": [{"text": f"Nobody saw {name} but", "word": other}
                  for name, other in zip(NAMES, NAMES[::-1], strict=True)],
        "yaml": """
output_type: loglikelihood
doc_to_text: text
doc_to_target: word
metric_list: [{metric: perplexity}, {metric: acc}]
"""},
}
OWN_METRICS = """
def raises(items):
    raise OverflowError("too large")

def endless(items):
    return float("inf")

def several(items):
    return {"first": 0.5, "second": 0.25}
"""
WRITES = """
task: writes
dataset_path: json
dataset_kwargs: {data_files: {test: last_word.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: text
doc_to_target: "{{[word, text]}}"
generation_kwargs: {until: ["."], max_gen_toks: 2}
metric_list:
- {metric: exact_match}
- {metric: chrf, aggregation: !function own.raises , higher_is_better: true}
- {metric: bleu, aggregation: !function own.endless , higher_is_better: true}
- {metric: ter, aggregation: !function own.several , higher_is_better: false}
"""

@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The tasks' files; data by absolute paths, so that the harness finds it by itself."""
    place = tmp_path_factory.mktemp("tasks")
    for name, task in TASKS.items():
        write_jsonl(place / f"{name}.jsonl", task["items"])
        (place / f"{name}.yaml").write_text(
            f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {place / name}.jsonl}}}}\n"
            f"test_split: test\nfewshot_split: test\n" + task["yaml"])
    return place


@pytest.fixture(scope="module")
def model():
    return for_tokenizer(VOCABULARY, context_length=192)


def ours(model, folder, *names, log=os.devnull):
    tasks = chosen_tasks(Config(evaluate=EvaluateConfig(tasks=list(names), task_folders=[str(folder)])))
    behind = harness(model, batch=3)
    return {task.name: measure_task(behind, task, None, ITERS, log) for task in tasks}


@pytest.mark.parametrize(("gold", "multiple_input", "right"), table("""
    1 -> 0 -> [1]
    "b" -> 0 -> [1]
    "x" -> 0 -> []
    -100 -> 0 -> []
    [2, 7, 0] -> 0 -> [0, 2]
    "a" -> 3 -> [0]""", json.loads, int, json.loads))
def test_right_choices(gold, multiple_input, right):
    task = SimpleNamespace(multiple_input=multiple_input, doc_to_choice=lambda doc: ["a", "b", "c"],
                           doc_to_target=lambda doc: "shared ending" if multiple_input else gold,
                           doc_to_text=lambda doc: 0 if multiple_input else "text")
    assert right_choices(task, {}) == (["a", "b", "c"], right)


def test_items_without_a_right_choice_are_counted_and_messages_go_to_the_log(model, folder, tmp_path, capfd):
    """Progress bars, warnings on labels and the line of each bootstrap."""
    result = ours(model, folder, "winograd", "named", log=tmp_path / "lm_eval.log")["named"]
    assert result["items_without_right_choice"] == [4, 8] and result["answer_bits_per_byte"] > 0
    assert result["chance"] == pytest.approx(6 / 8 / 3)
    assert capfd.readouterr() == ("", "")
    log = (tmp_path / "lm_eval.log").read_text()
    assert "bootstrapping for stddev: f1_score" in log
    assert "Label index was not in within range of available choices" in log


def test_a_task_that_fails_is_named_in_a_sentence_and_the_log_has_the_rest(model, folder, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(HarnessModel, "loglikelihood", Mock(side_effect=TypeError("no number\nat all.")))
    message = r"^The task named \(.*named.yaml\) failed: TypeError: no number\.$"
    refused(UserError, message, ours, model, folder, "named", log=tmp_path / "lm_eval.log")
    assert "Traceback" in (tmp_path / "lm_eval.log").read_text() and capfd.readouterr() == ("", "")


def test_a_metric_without_a_value_is_named_and_leaves_the_others(model, folder, tmp_path):
    """One of a task's own code, which fails or gives no number."""
    shutil.copy(folder / "last_word.jsonl", tmp_path)
    (tmp_path / "own.py").write_text(OWN_METRICS)
    (tmp_path / "writes.yaml").write_text(WRITES)
    result = ours(model, tmp_path, "writes", log=tmp_path / "log")["writes"]
    assert {name: entry["value"] for name, entry in result["metrics"].items()} == {
        "exact_match": 0.0, "chrf": None, "bleu": None, "ter": None}
    assert result["without_value"] == {
        "chrf": "OverflowError: too large.", "bleu": "it is inf.",
        "ter": "it is {'first': 0.5, 'second': 0.25}."}
    assert next(doubts({"writes": result})) == "writes: chrf has no value: OverflowError: too large"
    assert [*result["per_item"]["metrics"]] == ["exact_match"]


def test_an_answer_beyond_the_model_is_named_with_its_task(folder):
    refused(UserError, r"The task winograd .* failed: A task asks for .* the model takes 8", ours,
            for_tokenizer(VOCABULARY, context_length=8), folder, "winograd")
