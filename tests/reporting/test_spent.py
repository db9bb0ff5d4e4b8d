"""The chapters on time and on checkpoints: told where there is something to tell, and then with its figures."""

import shutil

import pytest

from drover.pipeline.core.files import write_json
from drover.pipeline.reporting.facts import collect
from drover.pipeline.reporting.render import compose, html, markdown
from tests.records.recorded_time import Recorded
from tests.records.test_goodput import LAUNCHED
from tests.reporting.made_up import block, results, write_run


@pytest.fixture
def made(tmp_path):
    """A run that was disturbed on Slurm and whose checkpoints 200, 400 and (finished) 600 were measured."""
    run, _ = write_run(tmp_path)
    shutil.rmtree(run.folder / "launch", ignore_errors=True)
    for name in ("events", "metrics"):
        (run.folder / f"train/{name}.jsonl").unlink()
    Recorded(run.folder).play(LAUNCHED)
    for step, bits in ((200, 2.5), (400, 2.25)):
        found = results()
        found["validation"]["overall"]["bits_per_byte"] = bits
        write_json(run.folder / f"evaluations/step-{step:08d}/evaluate/results.json", found)
    (run.folder / "evaluations/step-00000600/train").mkdir(parents=True)  # owed, not measured yet
    return run


def rows(document, title):
    return [row for _, row in block(document, title).rows]


def test_where_the_time_went(made):
    document = compose(collect(made))
    told = {row[0]: row[1:] for row in rows(document, "Time since the first start")}
    assert told["preflight"][:2] == ["17.0", "0.9%"] and told["hang"][:2] == ["610.0", "32.0%"]
    starts = rows(document, "Starts of training")
    assert [row[1] for row in starts] == \
        ["crashed: rank 1 was killed", "hung: rank 3 (n4) was late", "asked to stop (SIGTERM)"]
    assert [row[3:5] for row in starts] == [["0", "6"], ["4", "7"], ["4", "14"]]
    for form in (html(document), markdown(document)):
        assert "Goodput" in form and "rank 3 (n4) was late" in form


def test_checkpoints_on_the_way(made):
    document = compose(collect(made))
    found = rows(document, "Validation and tasks by step")
    assert found == [["200", "2.5000", "0.725", "0.325"], ["400", "2.2500", "0.725", "0.325"],
                     ["600", "1.9313", "0.725", "0.325"]]
    [line] = block(document, "Validation bits per byte by checkpoint").series
    assert line.y == [2.5, 2.25, 1.9313]
