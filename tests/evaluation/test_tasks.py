import json
import os
from pathlib import Path

import pytest
import torch

from model.config import ModelConfig
from pipeline.config.evaluation import EvaluateConfig
from pipeline.config.tree import Config
from pipeline.contract.stages import REPOSITORY
from pipeline.errors import UserError
from pipeline.evaluation.running import TaskRunner
from pipeline.evaluation.tasks import chosen_tasks, find_tasks, input_files
from pipeline.tokenization.simple import ByteTokenizer

YAML = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{query}}}}"
doc_to_choice: choices
doc_to_target: gold
target_delimiter: "{delimiter}"
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: acc_norm, aggregation: mean, higher_is_better: true}}
"""
ITEMS = [{"query": f"{number} is ", "choices": ["wrong", "false!", "yes", "no"], "gold": 2} for number in range(8)]


def write_task(folder, name="planted", data="items.jsonl", items=ITEMS, delimiter=""):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.yaml").write_text(YAML.format(name=name, data=data, delimiter=delimiter))
    if items is not None:
        (folder / data).write_text("".join(json.dumps(item) + "\n" for item in items))


def config(folder, *tasks, **more):
    return Config(evaluate=EvaluateConfig(tasks=list(tasks), task_folders=[str(folder)], **more))


class Prefers(torch.nn.Module):
    """A model that expects the bytes of one word, in order, whatever came before, and anything else equally little."""

    def __init__(self, word):
        super().__init__()
        self.word = word.encode()
        self.config = ModelConfig(vocab_size=ByteTokenizer().size, context_length=128)
        self.unused = torch.nn.Parameter(torch.zeros(1))

    def forward(self, tokens):
        logits = torch.zeros(*tokens.shape, self.config.vocab_size)
        logits[..., self.word[0]] = 3
        for before, after in zip(self.word, self.word[1:], strict=False):
            row = logits[tokens == before]
            row[:, after] = 9
            logits[tokens == before] = row
        return logits


def run(model, folder, *tasks, limit=None):
    from pipeline.evaluation.harness import HarnessModel
    harness = HarnessModel(model, ByteTokenizer(), batch=4)
    with TaskRunner(harness, [folder], limit, bootstrap_iters=100) as runner:
        return {task.name: runner.measure(task) for task in chosen_tasks(config(folder, *tasks))}


def test_planted_answers_are_picked(tmp_path):
    write_task(tmp_path)
    result = run(Prefers("yes"), tmp_path, "planted")["planted"]
    assert result["metrics"]["acc"]["value"] == result["metrics"]["acc_norm"]["value"] == 1
    assert result["metrics"]["acc"]["stderr"] == 0
    assert result["chance"] == 0.25 and result["items"] == 8 and result["few_shot"] == 0
    wrong = run(Prefers("no"), tmp_path, "planted")["planted"]
    assert wrong["metrics"]["acc"]["value"] == 0
    assert wrong["answer_bits_per_byte"] > result["answer_bits_per_byte"]


def test_half_right_has_the_standard_error_of_a_coin_and_limit_limits(tmp_path):
    items = [{**item, "gold": 2 if number < 4 else 3} for number, item in enumerate(ITEMS)]
    write_task(tmp_path, items=items)
    acc = run(Prefers("yes"), tmp_path, "planted")["planted"]["metrics"]["acc"]
    assert acc["value"] == 0.5
    assert acc["stderr"] == pytest.approx((0.25 / 7) ** 0.5)  # sample variance: n - 1
    assert run(Prefers("yes"), tmp_path, "planted", limit=4)["planted"]["metrics"]["acc"]["value"] == 1


@pytest.mark.parametrize("place", ["one", "one/deep"])
def test_input_files_are_the_yaml_and_its_data_named_wherever_they_are(tmp_path, place):
    write_task(tmp_path / place)
    write_task(tmp_path / "one", name="other", data="more.jsonl")
    found = input_files(config(tmp_path / "one", "planted"))
    assert found == [("planted/planted.yaml", tmp_path / place / "planted.yaml"),
                     ("planted/items.jsonl", tmp_path / place / "items.jsonl")]
    assert input_files(config(tmp_path / "one")) == []


def test_included_files_are_inputs_too(tmp_path):
    write_task(tmp_path)
    (tmp_path / "twice.yaml").write_text("include: planted.yaml\ntask: twice\nprocess_docs: !function helper.process\n")
    (tmp_path / "helper.py").write_text("def process(docs):\n    return docs\n")
    names = [name for name, _ in input_files(config(tmp_path, "twice"))]
    assert names == ["twice/twice.yaml", "twice/planted.yaml", "twice/helper.py", "twice/items.jsonl"]
    assert run(Prefers("yes"), tmp_path, "twice")["twice"]["metrics"]["acc"]["value"] == 1


@pytest.mark.parametrize(("texts", "task", "message"), [
    ([], "plantd", r"plantd.*has only planted; did you mean planted\?"),
    (["task: hub\ndataset_path: someone/dataset\n"], "hub", r"someone/dataset.*offline"),
    (["task: ["], "planted", r"0\.yaml cannot be read"), (["task: x\n", "task: x\n"], "x", "written twice"),
    (["task: glob\ndataset_kwargs: {data_files: {test: 'no*.jsonl'}}\n"], "glob", "no file matches")])
def test_what_is_wrong_with_a_task_is_said(tmp_path, texts, task, message):
    write_task(tmp_path)
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.yaml").write_text(text)
    with pytest.raises(UserError, match=message):
        input_files(config(tmp_path, task))
    with pytest.raises(UserError, match="not a folder"):
        input_files(config(tmp_path / "nowhere", "x"))


def test_folders_that_go_while_tasks_are_looked_for_are_passed_over(tmp_path, monkeypatch):
    """A run may lie among the tasks, and another rank of it renames its folders."""
    write_task(tmp_path / "tasks")
    (tmp_path / "run/units.tmp").mkdir(parents=True)
    scandir = os.scandir

    def going(folder):
        if Path(folder).name == "units.tmp":
            Path(folder).rmdir()
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", going)
    assert list(find_tasks([tmp_path])) == ["planted"]
    assert not (tmp_path / "run/units.tmp").exists(), "it was looked into"


def test_data_that_is_no_json_is_a_user_error(tmp_path):
    write_task(tmp_path, items=None)
    (tmp_path / "items.jsonl").write_text("{not json\n")
    with pytest.raises(UserError, match=r"planted.*cannot be loaded"):
        run(Prefers("yes"), tmp_path, "planted")


def test_shipped_tasks_are_well_made():
    names = ["python_line", "python_stdlib"]
    found = find_tasks([REPOSITORY / "configs" / "tasks"])
    assert sorted(found) == names
    for name in names:
        path, = found[name].data_files["test"]
        items = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
        assert len(items) == 40
        assert len({item["query"] + item["choices"][item["gold"]] for item in items}) == 40
        assert all(len(set(item["choices"])) == 4 for item in items)
        golds = [item["gold"] for item in items]
        assert all(golds.count(place) == 10 for place in range(4)), "always the same guess must not beat chance"
