import dataclasses
import re
from itertools import chain, combinations
from math import dist
from pathlib import Path
from xml.etree import ElementTree

import pytest

from drover.pipeline.core.files import read_json
from drover.pipeline.data.sampling.consumption import as_if
from drover.pipeline.records.checkpoint_scores import CheckpointScores
from drover.pipeline.records.goodput import goodput
from drover.pipeline.records.metrics import OTHER_ORDER, RunFacts
from drover.pipeline.reporting.chapters.summary import notices
from drover.pipeline.reporting.document import Series, Table
from drover.pipeline.reporting.facts import Facts, collect
from drover.pipeline.reporting.render import COLOURS, compose, html, markdown
from tests.records.recorded_time import Recorded
from tests.records.test_goodput import LAUNCHED
from tests.reporting.made_up import EVIL, write_run
from tests.reporting.picture import RECORD, REPOSITORY, hashes


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    run, _ = write_run(tmp_path_factory.mktemp("complete") / "alike")
    return collect(run)


def test_the_colours_of_two_lines_are_told_apart():
    """In every scheme: in RGB they are far from each other."""
    schemes = (REPOSITORY / "pipeline/reporting/templates/report.css").read_text().split(":root {")[1:]
    for scheme in schemes:
        colours = [bytes.fromhex(text) for text in re.findall(r"--series-\d: #(\w{6})", scheme)]
        assert len(colours) == COLOURS and min(dist(*pair) for pair in combinations(colours, 2)) > 65


@pytest.fixture(scope="module")
def document(facts):
    return compose(facts)


@pytest.fixture(scope="module")
def page(document):
    return ElementTree.fromstring(html(document))


def test_nothing_is_loaded_and_nothing_runs(page):
    assert {element.tag for element in page.iter()}.isdisjoint(
        {"script", "img", "link", "iframe", "object", "embed", "base", "form", "use", "image"})
    for element in page.iter():
        for name, value in element.items():
            assert not name.startswith("on") and "url(" not in value, (element.tag, name)
            assert value.startswith("#") or name not in ("src", "href", "data", "action", "srcset"), value
        assert element.tag != "style" or not re.search(r"@import|url\(", element.text)
    assert [f"#{part.get('id')}" for part in page.iter("section")] == [link.get("href") for link in page.iter("a")]


def test_the_whole_report_is_as_it_was_read(document):
    """report.md beside this file was read by a person, but for what depends on machine and code. If a change is meant,
    write `text` there and read it again."""
    text = markdown(document).partition("\n## Provenance")[0].rstrip() + "\n"
    assert text == (Path(__file__).parent / "report.md").read_text(encoding="utf-8")
    assert EVIL in text and "\n````text\n" in text, "a longer fence than any in the text"
    assert not re.search(r"<(?!u\b)", re.sub(r"(?s)(`{3,})text\n.*?\n\1", "", text)), "HTML outside of code blocks"


def test_the_page_has_the_same(document, page):
    shown = "".join(page.itertext())
    for part in chain(*(chapter.blocks for chapter in document.chapters)):
        texts = [part] if isinstance(part, str) else [*part.columns, *chain(*part.columns.values())] \
            if isinstance(part, Table) else [part.title]
        assert [text for text in texts if text not in shown] == []
    assert shown.count(document.result) == 1 and all(tile.value in shown for tile in document.tiles)
    assert EVIL in shown
    assert "99.0" not in shown, "the values of steps that were done again"
    assert "step 800" not in shown, "texts of a plan that was longer"
    assert not re.search(r"[^.\w:](/\w+){3}", shown), "a path from the root"


def test_loss_shows_training_and_validation_without_skipped_updates(document):
    [loss] = [part for chapter in document.chapters for part in chapter.blocks if getattr(part, "title", "") == "Loss"]
    each, mean, stdlib = loss.series
    assert (len(each.y), len(mean.y), max(each.y)) == (598, 54, 8.9) and mean.name == "training, mean of 11"
    assert (stdlib.name, stdlib.x[-1]) == ("validation sample, stdlib", 600) and stdlib.y[-1] == 3.2 + 200 / 600


def test_scores_of_checkpoints_are_curves_over_tokens_that_end_at_the_finished_model(facts):
    """The charts themselves: test_comparison.py."""
    task = {"metrics": {"acc": {"value": 0.4, "stderr": 0.02}}, "chance": 0.25, "answer_bits_per_byte": 1.5}
    document = compose(dataclasses.replace(facts, scores=[CheckpointScores(
        200, "", 1638400, 4e14, {"overall": {"bits_per_byte": 2.5}}, {"python_line": task}, suites={
            "core": {"value": 0.1, "stderr": 0.01}})]))
    blocks = next(chapter.blocks for chapter in document.chapters if chapter.title == "Scores while training")
    charts = {part.title.removesuffix(" over tokens"): part for part in blocks if getattr(part, "over", "") == "tokens"}
    final = facts.results["tasks"]["python_line"]
    _, line = charts["python_line, acc"].series
    assert line.x == (1638400, facts.counts("train")["tokens"])
    assert [*zip(line.y, line.errors, strict=True)] == [(0.4, 0.02), tuple(final["metrics"]["acc"].values())]
    assert charts["core, score"].series == [Series("score", (1638400,), (0.1,), errors=(0.01,))]
    assert charts["python_line, answer bits per byte"].series[0].y == (1.5, final["answer_bits_per_byte"])
    assert "| 200 | 1,638,400 | 4.00e+14 | 2.5000 | python_line acc 0.400 ± 0.020, answers 1.500 bits per byte " in (
        markdown(document))


def test_where_the_time_went(facts, tmp_path):
    Recorded(tmp_path).play(LAUNCHED)
    text = markdown(compose(dataclasses.replace(facts, goodput=goodput(RunFacts(tmp_path)))))
    for row in ("| preflight | 17.0 | 0.9% |", "| hang | 610.0 | 32.0% |",
                " | crashed: rank 1 was killed | 2 | 0 | 6 |", " | hung: rank 3 (n4) was late |"):
        assert row in text


def test_a_sparse_run_has_a_report_too(facts):
    manifests = {name: dataclasses.replace(manifest, counts={}, software={}, git={}, execution={}, files=[])
                 for name, manifest in facts.manifests.items()}
    document = compose(Facts(facts.config, manifests))
    for form in (html(document), markdown(document)):
        assert "It was not evaluated on validation text" in form and "run time" in form and "Configuration" in form


def test_the_report_says_that_its_epochs_assume_the_present_order(facts):
    event = {"event": "plan_changed", "step": 4, "changes": [OTHER_ORDER]}
    for events in ([], [event]):
        assert (as_if([4])[0] in str([*notices(dataclasses.replace(facts, events=events))])) == bool(events)


def every(value, number):
    """Nested records with this in place of each number that was measured."""
    if isinstance(value, dict):
        return {key: every(inner, number) for key, inner in value.items()}
    return number if isinstance(value, float) else value


@pytest.mark.parametrize("odd", [0.0, 1e300, None, "nan"])
def test_no_number_makes_the_report_fail(facts, odd):
    """Zeros, huge ones, results without a value, and in metrics.jsonl NaN as text."""
    strange = dataclasses.replace(
        facts, metrics=[every(record, odd) for record in facts.metrics],
        results=every(facts.results, None if odd == "nan" else odd), tokenizer=every(facts.tokenizer, odd))
    document = compose(strange)
    assert ElementTree.fromstring(html(document)) is not None and markdown(document)


def test_the_picture_is_of_todays_demo():
    record = read_json(RECORD)
    assert record == {**record, **hashes()}, "make it again: make demo picture"
    assert f"**{record['bits_per_byte']:.2f} bits per byte**" in (REPOSITORY / "README.md").read_text()
