import dataclasses
import math
import re
from itertools import chain
from pathlib import Path
from xml.etree import ElementTree

import pytest

from drover.pipeline.config.tree import Config
from drover.pipeline.contract.manifest import read_manifest
from drover.pipeline.core.files import append_line, read_json, write_json
from drover.pipeline.reporting.document import Table
from drover.pipeline.reporting.facts import collect
from drover.pipeline.reporting.render import compose, html, markdown, of_results
from tests.reporting.made_up import EVIL, block, metrics, results, write_run


class Page:
    """The elements and the text of a page, which is well-formed."""

    def __init__(self, source):
        root = ElementTree.fromstring(source)
        self.elements, self.text = list(root.iter()), "".join(root.itertext())


@pytest.fixture(scope="module")
def made_up(tmp_path_factory):
    run, _ = write_run(tmp_path_factory.mktemp("complete") / "alike")
    return compose(collect(run))


@pytest.fixture(scope="module")
def complete(made_up):
    return html(made_up), markdown(made_up)


@pytest.fixture(scope="module")
def page(complete):
    return Page(complete[0])


def test_nothing_is_loaded_and_nothing_runs(page):
    assert {element.tag for element in page.elements}.isdisjoint(
        {"script", "img", "link", "iframe", "object", "embed", "base", "form", "use", "image"})
    for element in page.elements:
        for name, value in element.items():
            assert not name.startswith("on") and "url(" not in value, (element.tag, name)
            assert value.startswith("#") or name not in ("src", "href", "data", "action", "srcset"), value
        assert element.tag != "style" or not re.search(r"@import|url\(", element.text)


def test_what_a_model_or_a_document_wrote_is_text(complete, page):
    assert EVIL in page.text
    assert "&lt;script&gt;" in complete[0] and "<script" not in complete[0]
    assert "```" in EVIL and "\n````text\n" in complete[1], "a longer fence than any in the text"


def test_links_lead_to_chapters(page):
    ids = [element.get("id") for element in page.elements if element.get("id")]
    assert {f"#{name}" for name in ids} == {element.get("href") for element in page.elements if element.tag == "a"}
    assert len(ids) == len(set(ids)) > 8


def test_the_whole_report_is_as_it_was_read(complete):
    """report.md beside this file was read by a person, but for what depends on machine and code. If a change is meant,
    write `told` there and read it again."""
    told = complete[1].partition("\n## Stages and machines")[0].rstrip() + "\n"
    assert told == (Path(__file__).parent / "report.md").read_text(encoding="utf-8")


def test_the_page_says_the_same(made_up, page):
    for chapter in made_up.chapters:
        for part in chapter.blocks:
            rows = [row for _, row in part.rows] if isinstance(part, Table) else []
            for text in [part] if isinstance(part, str) else [*getattr(part, "columns", ()), *chain(*rows)]:
                assert text in page.text, text
    assert page.text.count(made_up.verdict) == 1 and all(tile.value in page.text for tile in made_up.tiles)
    assert "99.0" not in page.text, "the values of steps that were done again"


def test_nobody_looked_for_items():
    found = results()
    for task in found["tasks"].values():
        del task["contamination"]
    assert "Contamination" not in html(of_results(Config(name="a"), found, ""))


def test_loss_shows_training_and_validation_without_skipped_updates(made_up):
    loss = {line.name: line.y for line in block(made_up, "Loss").series}
    assert list(loss) == ["training, each step", "training, mean of 11", "validation, stdlib", "validation, prose"]
    assert [len(values) for values in loss.values()] == [598, 598, 8, 8] and max(map(max, loss.values())) < 10
    assert loss["validation, stdlib"][-1] == pytest.approx((1.85 + 1 / 3) * math.log(2) * 9530 / 2723)


def test_labels_are_words(made_up):
    tables = [block for chapter in made_up.chapters for block in chapter.blocks if isinstance(block, Table)]
    labels = [heading for table in tables for heading in table.columns]
    labels += [row[0] for table in tables if list(table.columns) == ["", " "] for _, row in table.rows]
    assert len(labels) > 100 and [label for label in labels if "_" in label] == []


GIVEN = " (of 28.1 MB of training text gzip was given 32 KB, xz 16.1 MB)"


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize(("figures", "told"), [
    ({"xz -9 after training text": 1.9, "xz -9": 2.3},
     f": 2% more than xz -9{GIVEN}. xz -9 compresses it better than the model."),
    ({"unigram": 4.7, "gzip -9 after training text": 2.2, "xz -9": 1.5},
     f": 59% less than a unigram byte model, 12% less than gzip -9{GIVEN}."),
    ({"unigram": 1.2, "gzip -9 after training text": 2.2},
     f": 61% more than a unigram byte model, 12% less than gzip -9{GIVEN}. Even a unigram byte model compresses it "
     "better than the model."),
    ({"unigram": 4.7, "xz -9": 1.5, "gzip -9": 2.3}, ": 59% less than a unigram byte model."),
    ({"xz -9": 1.5, "gzip -9": 2.3}, ".")])
def test_only_compressors_that_have_seen_training_text_are_compared_with_the_model(tmp_path, figures, told, small):
    """Where one needs less than the model, the first sentence has it. Older results have none of them."""
    run, _ = write_run(tmp_path)
    path = run.own_folder("evaluate") / "results.json"
    found = read_json(path)
    found["validation"]["overall"]["baselines"] = figures
    if small:
        found["validation"]["overall"] |= {"training_bytes": 2000, "of_training_bytes": 9000}
        told = told.replace(GIVEN, " (of 9 kB of training text gzip was given 2 kB, xz 2 kB)")
    write_json(path, found)
    assert compose(collect(run)).verdict.endswith(f"needs 1.931 bits per byte of validation text{told}")


def test_a_sparse_run_has_a_report_too(tmp_path):
    run, _ = write_run(tmp_path, sparse=True)
    document = compose(collect(run))
    sparse = Page(html(document))
    assert "It was not evaluated on validation text" in sparse.text
    assert "run time" in sparse.text and "Configuration" in sparse.text
    assert "not evaluated" in markdown(document)


def test_drift_and_changed_code_stand_at_the_top(tmp_path):
    run, _ = write_run(tmp_path, drift=True)
    document = compose(collect(run))
    text = html(document)
    for warning in ("--accept-drift allowed it", "encode.dtype", "The code has changed since these stages ran"):
        assert text.index(warning.replace('"', "&#34;")) < text.index('class="tiles"')
        assert warning in markdown(document)
    assert [notice.kind for notice in document.notices][:2] == ["warning", "warning"]


def test_text_that_was_repeated_many_times_stands_at_the_top(tmp_path):
    run, _ = write_run(tmp_path)
    manifest = read_manifest(run.own_folder("train"))
    manifest.counts["epochs"] = {"web": 239.96, "code": 4.0}
    manifest.write(run.own_folder("train"))
    [warning] = [notice for notice in compose(collect(run)).notices if "repeated more than 4 times" in notice.text]
    assert warning.kind == "warning" and warning.entries == ["web: 240.0 epochs"]


def test_equal_runs_give_equal_reports(tmp_path, complete, page):
    run, _ = write_run(tmp_path / "alike")
    assert html(compose(collect(run))) == complete[0]
    assert not re.search(r"[^.\w:](/\w+){3}", page.text), "a path from the root"


def test_what_a_former_longer_plan_left_is_not_shown(tmp_path):
    """Lines and texts of steps after the last, from before the training was made shorter."""
    run, _ = write_run(tmp_path)
    for name, record in (("metrics", {**metrics()[299], "step": 601}),
                         ("samples", {"step": 601, "prompt": "class ", "text": "of no model"}),
                         ("events", {"event": "plan_changed", "step": 598, "number": 1, "changes": ["shorter"],
                                     "time": "2026-03-01T10:02:00.000+00:00"})):
        append_line(run.stage_folder("train") / f"{name}.jsonl", record)
    facts = collect(run)
    assert facts.metrics[-1]["step"] == 598 and len(facts.samples) == 6


def test_text_that_was_held_out_from_the_end_and_cut_is_told(tmp_path):
    run, settings = write_run(tmp_path)
    settings = settings.model_copy(update={"shard": settings.shard.model_copy(update={"validation_rule": "tail"})})
    manifest = read_manifest(run.own_folder("shard"))
    for counts in (manifest.counts, *manifest.counts["sources"].values()):
        counts["cut_in_two"] = 2
    manifest.write(run.own_folder("shard"))
    text = markdown(compose(dataclasses.replace(collect(run), config=settings)))
    for told in ("from the end of each source's text", "| source | came in | cut in two | training |",
                 "Came in + cut in two = training"):
        assert told in text
