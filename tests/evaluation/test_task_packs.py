"""The forms of tasks that configs/tasks/README.md shows, as they stand there, on a small model."""

import os

import pytest

from drover.pipeline.core.files import read_lines
from drover.pipeline.evaluation.harness import measure_task
from drover.pipeline.evaluation.tasks import tasks_named
from tests.data.source_files import write_jsonl
from tests.evaluation.task_pack import FILES, write_pack
from tests.evaluation.test_harness import VOCABULARY, requests
from tests.evaluation.test_harness import harness as behind_harness
from tests.tiny_models import for_tokenizer

NAMES = [name.removesuffix(".yaml") for name in FILES if name.endswith(".yaml")]


@pytest.fixture(scope="module")
def harness():
    return behind_harness(for_tokenizer(VOCABULARY, context_length=256), batch=2)


@pytest.fixture(scope="module")
def pack(tmp_path_factory, harness):
    """The README's files; the model gives the first sum's answer, so that something is right."""
    place = write_pack(tmp_path_factory.mktemp("pack") / "tasks")
    items = [*read_lines(place / "sums.jsonl")]
    written, = harness.generate_until(requests(("2 + 3 =", {"until": ["\n"], "max_gen_toks": 8})))
    items[0]["sum"] = written.strip()
    write_jsonl(place / "sums.jsonl", items)
    return place


@pytest.fixture(scope="module")
def results(pack, harness):
    return {task.name: measure_task(harness, task, None, 20, os.devnull)
            for task in tasks_named(NAMES, [pack], "the test")}


@pytest.mark.parametrize("name", NAMES)
def test_every_row_can_be_read_alone(results, pack, name):
    result = results[name]
    data = [*read_lines(pack / f"{name.removesuffix('_2shot')}.jsonl")]
    assert result["items"] == len(data) and result["version"] == "1.0"
    assert result["few_shot"] == (2 if name == "capitals_2shot" else 0)
    assert result["chance"] == (pytest.approx((1 / 3 + 1 / 3 + 1 / 4) / 3) if "capitals" in name else None)
    assert all(entry["stderr"] is not None for metric, entry in result["metrics"].items()
               if not metric.endswith("_perplexity"))
    assert (result["answer_bits_per_byte"] is None) == (name in ("pages", "sums"))
    assert len(result["per_item"]["hashes"]) == len(data)
    if "capitals" in name:  # examples are no part of an item
        assert result["per_item"]["texts"][0] == "Question: What is the capital of France?\nAnswer: Paris"


def test_what_is_written_is_compared(results):
    assert results["sums"]["metrics"] == {"exact_match (stripped)": {"value": 0.5, "stderr": pytest.approx(0.5)}}
    assert results["sums"]["per_item"]["metrics"]["exact_match (stripped)"] == [(1.0, 1.0), (0.0, 1.0)]
