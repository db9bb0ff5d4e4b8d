import os
import re
from collections import Counter
from pathlib import Path

import pytest

from drover.pipeline.config.tree import Config, EvaluateConfig
from drover.pipeline.contract.stages import REPOSITORY, STAGES
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import read_lines
from drover.pipeline.evaluation.harness import measure_task
from drover.pipeline.evaluation.selection import chosen_tasks, input_files
from drover.pipeline.evaluation.tasks import find_tasks
from tests.evaluation.test_harness import Uniform, harness
from tests.refusal import refused
from tests.stages.small_run import item, write_task


def write_planted(folder, name="planted"):
    write_task(folder, name, *(item(number, 2) for number in range(8)))


def config(folder, *tasks, **more):
    return Config(evaluate=EvaluateConfig(tasks=list(tasks), task_folders=[str(folder)], **more))


def run(folder, name, limit=None):
    """What a model without an opinion has; tests/evaluation/test_running.py compares figures."""
    task, = chosen_tasks(config(folder, name))
    return measure_task(harness(Uniform()), task, limit, 100, os.devnull)


@pytest.mark.parametrize("place", ["one", "one/deep"])
def test_input_files_are_the_yaml_and_its_data_named_wherever_they_are(tmp_path, place):
    write_planted(tmp_path / place)
    write_planted(tmp_path / "one", "other")
    result = input_files(config(tmp_path / "one", "planted"))
    assert result == [("planted/planted.yaml", tmp_path / place / "planted.yaml"),
                     ("planted/planted.jsonl", tmp_path / place / "planted.jsonl")]
    assert input_files(config(tmp_path / "one")) == []


def test_included_files_are_inputs_too(tmp_path):
    write_planted(tmp_path)
    (tmp_path / "twice.yaml").write_text("include: planted.yaml\ntask: twice\nprocess_docs: !function helper.process\n")
    (tmp_path / "helper.py").write_text("def process(docs):\n    return docs\n")
    names = [name for name, _ in input_files(config(tmp_path, "twice"))]
    assert names == ["twice/twice.yaml", "twice/planted.yaml", "twice/helper.py", "twice/planted.jsonl"]
    assert [run(tmp_path, "twice", limit)["items"] for limit in (None, 4)] == [8, 4]


@pytest.mark.parametrize(("texts", "task", "message"), [
    ([], "hellaswag", "hellaswag, whose data is not in task_data.* give: drover tasks fetch hellaswag$"),
    ([], "plantd", r"plantd, .* are planted; did you mean .planted.\?"),
    (["task: hub\ndataset_path: someone/dataset\n"], "hub", "fetch hub --task-folders /"),
    (["task: code\ncustom_dataset: !function a.b\n"], "code", "by code of its own"),
    (["task: ["], "planted", r"0\.yaml cannot be read"),
    (["metric_list: [acc]"], "planted", r"0\.yaml cannot be read: metric_list is \['acc'\]"),
    (["task: x\n", "task: x\n"], "x", "defined twice"),
    (["task: glob\ndataset_kwargs: {data_files: {test: 'no*.jsonl'}}\n"], "glob", "no file matches")])
def test_what_is_wrong_with_a_task_is_said(tmp_path, texts, task, message):
    write_planted(tmp_path)
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.yaml").write_text(text)
    refused(UserError, message, input_files, config(tmp_path, task))
    refused(UserError, "not a folder", input_files, config(tmp_path / "nowhere", "x"))


@pytest.mark.parametrize(("change", "message"), [
    (("planted.jsonl", '{"query": "Item 0', '\ufeff{"query": "Item 0'), ""),
    (("planted.jsonl", "Item 2:", '"'), r"planted\.jsonl:3 is no item in JSON \(.*\)\. Write"),
    (("planted.jsonl", '"query": "Item 2:", ', ""), r"planted\.jsonl:3 lacks query\. .* Give every line the fields"),
    (("planted.yaml", "{{query}}", "{% for n in range(2) %}{{query | regex_replace('a', 'b')}}{% endfor %}"), ""),
    (("planted.yaml", "{{query}}", "{{query"), "Correct the template"),
    (("planted.yaml", "doc_to_target: gold", "doc_to_target: golds"),
     r"doc_to_target names golds, which no item of .*planted\.jsonl has; did you mean 'gold'\?"),
    (("planted.yaml", "{{query}}", "{{qry}}"), r"doc_to_text names qry, .* did you mean 'query'\?"),
    (("planted.yaml", "{{query}}", "{% set a = query %}{{ a[:9] }}{{ range(2) }}"), ""),
    (("planted.yaml", "test_split: test", "test_split: dev"), "test_split is dev, but data_files has test"),
    (("planted.yaml", "metric: acc", "metric: accuracy"), "names accuracy, .* did you mean 'acc'")])
def test_a_task_that_cannot_be_scored_is_refused_with_file_and_line(tmp_path, change, message):
    """By the launcher, and where it is measured."""
    write_planted(tmp_path)
    name, old, new = change
    text = (tmp_path / name).read_text()
    assert old in text
    (tmp_path / name).write_text(text.replace(old, new))
    problems = STAGES["evaluate"].call("problems", config(tmp_path, "planted"))
    if not message:
        assert problems == []
        return
    problem, = problems
    assert re.search(message, problem)
    refused(UserError, message, run, tmp_path, "planted")
    (tmp_path / "planted.jsonl").write_text("")
    assert "planted.jsonl has no items" in STAGES["evaluate"].call("problems", config(tmp_path, "planted"))[-1]


def test_shipped_tasks_are_well_made():
    result = find_tasks([REPOSITORY / "configs" / "tasks"], Path())
    assert sorted(result) == ["python_line", "python_stdlib"]
    for task in result.values():
        path, = task.data_files["test"]
        items = [*read_lines(Path(path))]
        assert len({item["query"] + item["choices"][item["gold"]] for item in items}) == len(items) == 40
        assert all(len(set(item["choices"])) == 4 for item in items)
        assert set(Counter(item["gold"] for item in items).values()) == {10}, "one guess must not beat chance"
