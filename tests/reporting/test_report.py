import dataclasses
import json
import math
import re
from xml.etree import ElementTree

import pytest

from drover.pipeline.contract.manifest import read_manifest
from drover.pipeline.reporting.document import Table
from drover.pipeline.reporting.facts import collect
from drover.pipeline.reporting.render import compose, html, markdown
from tests.reporting.made_up import EVIL, block, metrics, results, write_run


class Page:
    """The elements and the text of a page, which is well-formed."""

    def __init__(self, source):
        root = ElementTree.fromstring(source)
        self.elements, self.text = list(root.iter()), "".join(root.itertext())


def append(run, name, *records):
    """Add lines to a file of the training."""
    time = {"time": "2026-03-01T10:02:00.000+00:00"} if name == "events" else {}
    with open(run.stage_folder("train") / f"{name}.jsonl", "a") as file:
        for record in records:
            file.write(json.dumps({**time, **record}) + "\n")


@pytest.fixture(scope="module")
def made_up(tmp_path_factory):
    run, _ = write_run(tmp_path_factory.mktemp("complete"))
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


def test_all_results_are_told(complete, page):
    found = results()
    figures = [f"{entry[key]:.4f}" for entry in (*found["heldout"]["sources"].values(), found["heldout"]["overall"])
               for key in ("bits_per_byte", "entropy")]
    figures += [f"{value:.4f}" for value in found["heldout"]["overall"]["baselines"].values()]
    figures += [f"{entry[key]:,}" for entry in found["heldout"]["sources"].values()
                for key in ("documents", "bytes", "targets")]
    for name, task in found["tasks"].items():
        figures += [name, f"{task['chance']:.3f}", f"{task['answer_bits_per_byte']:.3f}"]
        figures += [f"{entry[key]:.3f}" for entry in task["metrics"].values() for key in ("value", "stderr")]
    figures += [f"{metrics()[-1]['loss']:.4f}", "4,327,168", "4.33M", "4.92M", "2,960", "40.1 MB", "sentencepiece",
                "Restarts of training: 1", "resume", "c0ffeec0ff", "2.13.0", "max_rejected_share", "181.3"[:3]]
    for figure in figures:
        assert figure in page.text, figure
    for figure in figures[:-2]:
        assert figure in complete[1], figure
    assert "99.0" not in page.text, "the values of steps that were done again"


def test_each_source_has_its_data_card(complete, page):
    """Tokens come from encode, duplicates from shard; the rest is the card's."""
    for row in ("| source | documents | changed | duplicates | text | characters | bytes per character | "
                "bytes per document | tokens | bytes per token |",
                "| stdlib | 2,918 | 10.0% | 2.8% | 27.2 MB | 26,800,000 | 1.015 | 9,321 | 7,722,428 | 3.5 |",
                "Document lengths: stdlib 6.9% up to 256 B, 93.1% up to 1.02 kB; prose 6.9% up to 256 B",
                "| prose | language | de | 88 | 5.9% |", "| prose | url | 1,370 | 1,479 | 92.6% |",
                "| decontamination | gsm8k | 41 | 33 | 1,319 | 7 |"):
        assert row in complete[1].replace("**", ""), row
    for form in (complete[1], page.text):
        assert "decontamination: 13 words in a row, or a whole item of 8 to 13 words; such documents were dropped" \
            in form
        assert "prose, length: fewer than 20 words\n  a.jsonl:1  too short </pre><script>" in form


def test_every_figure_of_a_task_can_be_read_alone(complete, page):
    """Version, n, standard error, and a level of chance where it is one."""
    text = complete[1].replace("**", "")
    for row in ("| task | version | metric | value | std. error | chance | items | few-shot | answer bits per byte |",
                "| python_line | 1.0 | acc | 0.725 | 0.073 | 0.250 | 40 | 0 | 1.234 |",
                "| python_stdlib | 2.5 | acc | 0.325 | 0.073 | 0.250 | 40 of 1,234 | 0 | 1.234 |",
                "| python_stdlib | 2.5 | mcc | 0.111 | 0.100 | – | 40 of 1,234 | 0 | 1.234 |"):
        assert row in text, row
    for form in (text, page.text):
        assert "Metrics are those of lm_eval 0.4.13" in form
    # 0.725 is above chance by more than two standard errors, 0.325 and 0.275 are not.
    assert re.findall(r"\| \*\*(python_\w+)\*\* \| \*\*[^|]*\| \*\*(\w+)", complete[1]) == [("python_line", "acc")]
    assert complete[0].count('<tr class="strong"><td data-heading="task">python_line</td>') == 1


def test_samples_are_the_first_prompts_of_each_step(complete, page):
    for form in (complete[1], page.text):
        assert all(f"class {step} " in form and f"import {step} " not in form for step in (200, 400, 600))
        assert "3.480" in form, "a figure of the tokenizer that is no share"


def test_clean_and_dirty_items_stand_beside_each_other(complete, page, tmp_path):
    for row in ("| task | metric | all items | n | clean | n clean | contaminated | n contaminated | too short to tell "
                "|",
                "| python_line | acc | 0.725 ± 0.073 | 40 | 0.708 ± 0.095 | 24 | 0.909 ± 0.091 | 11 | 5 |",
                "| python_line | answer_bits_per_byte | 1.234 | 40 | 1.302 ± 0.081 | 24 | 1.003 ± 0.131 | 11 | 5 |",
                "| python_stdlib | acc | 0.325 ± 0.073 | 40 | – | 0 | – | 0 | 40 |"):
        assert row in complete[1], row
    assert "0.909 ± 0.091" in page.text and "dirty items are those of which more than half" in page.text
    run, _ = write_run(tmp_path)
    found = results()
    for task in found["tasks"].values():
        del task["contamination"]
    (run.stage_folder("evaluate") / "results.json").write_text(json.dumps(found))
    assert "Contamination" not in html(compose(collect(run))), "where nobody looked for items"


def test_validation_is_told_where_it_was_measured(made_up):
    rows = [row for _, row in block(made_up, "Loss by step").rows]
    assert {row[0] for row in rows if row[-1] != "–"} == {f"{step}" for step in range(100, 601, 100)}
    assert rows[-1][-2:] == [f"{1.85 + 200 / 600:.3f}", f"{2.02 + 200 / 600:.3f}"]
    loss = {line.name: line for line in block(made_up, "Loss").series}
    assert list(loss) == ["training, each step", "training, mean of 12", "validation, stdlib", "validation, prose"]
    assert loss["validation, stdlib"].y[-1] == pytest.approx((1.85 + 1 / 3) * math.log(2) * 9530 / 2723)


def test_the_parts_of_the_vocabulary_add_up(complete):
    sentence = re.search(r"ids, ([\d,]+) of them used: ([\d,]+) pieces, ([\d,]+) special tokens, ([\d,]+) byte-",
                         complete[1])
    used, *parts = (int(number.replace(",", "")) for number in sentence.groups())
    assert sum(parts) == used and len(parts) == 3


def test_labels_are_words(made_up):
    tables = [block for chapter in made_up.chapters for block in chapter.blocks if isinstance(block, Table)]
    labels = [heading for table in tables for heading in table.columns]
    labels += [row[0] for table in tables if list(table.columns) == ["", " "] for _, row in table.rows]
    assert len(labels) > 100 and [label for label in labels if "_" in label] == []


def test_what_the_export_was_compared_with_is_told(complete, page):
    for figure in ("1.62e-05", "2.37e-05", "1.91e-05", "1.30e-05", "31.25", "3.062", "511"):
        assert figure in page.text and figure in complete[1], figure


def test_characters_that_the_vocabulary_cannot_keep_are_told(complete, page):
    for form in (page.text, complete[1]):
        assert "Documents with that character: 4,321." in form
        assert "which sentencepiece uses for a space, is in 4,321 of the documents" in form


def test_the_verdict_compares(complete):
    for form in complete:
        assert "59% less than a unigram byte model, 9% less than gzip -9, 2% less than xz -9" in form


def test_markdown_tables_are_tables(complete):
    """Every row of a table has as many cells as its heading."""
    width, fenced = None, False
    for line in complete[1].splitlines():
        fenced ^= line.startswith("```")
        if fenced or not line.startswith("|"):
            width = None
            continue
        cells = len(re.findall(r"(?<!\\)\|", line)) - 1
        width = width or cells
        assert cells == width, line


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


def test_equal_runs_give_equal_reports(tmp_path):
    pages = []
    for place in ("a", "b"):
        (tmp_path / place / "alike").mkdir(parents=True)
        run, _ = write_run(tmp_path / place / "alike")
        pages.append(html(compose(collect(run))))
    assert pages[0] == pages[1]
    assert not re.search(r"[^.\w:](/\w+){3}", Page(pages[0]).text), "a path from the root"


def test_what_a_former_longer_plan_left_is_not_shown(tmp_path):
    """Lines and texts of steps after the last, from before the training was made shorter."""
    run, _ = write_run(tmp_path)
    append(run, "metrics", {**metrics()[299], "step": 601})
    append(run, "samples", {"step": 601, "prompt": "class ", "text": "of no model"})
    append(run, "events", {"event": "plan_changed", "step": 598, "number": 1, "changes": ["shorter"]})
    facts = collect(run)
    assert facts.metrics[-1]["step"] == 598 and [sample["step"] for sample in facts.samples[::2]] == [200, 400, 600] \
        and len(facts.samples) == 6


def test_steps_that_went_wrong_are_told_and_left_out_of_the_curves(tmp_path):
    run, _ = write_run(tmp_path)
    append(run, "metrics", *({**metrics()[299], "step": step, "loss": loss, "grad_norm": "inf", "skipped": why}
                             for step, loss, why in ((300, "nan", "nonfinite"), (601, 4e9, "spike"))))
    documents = [{"source": "prose", "key": f"k{number}"} for number in range(7)]
    append(run, "events", {"event": "skip", "step": 300, "text": "step 300: loss nan", "documents": documents},
           {"event": "checkpoint_failed", "step": 400, "attempt": 1, "error": "the disk was full"},
           {"event": "checkpoint", "step": 400, "path": "x", "stall_s": 1.5, "seconds": 9.0},
           {"event": "checkpoint_copied", "step": 400, "bytes": 1_500_000, "seconds": 2.0, "behind_s": 3.5},
           {"event": "checkpoint_copied", "step": 600, "bytes": 1_000_000, "seconds": 2.0, "behind_s": 2.5},
           {"event": "checkpoint_copy_failed", "step": 400, "error": "the store was away", "seconds": 1.0},
           *({"event": "spike", "step": step} for step in range(500, 560)))
    manifest = read_manifest(run.own_folder("train"))
    manifest.counts.update(skipped=2, spikes=61, rollbacks=1, engine="deepspeed", loss="nan")
    manifest.write(run.own_folder("train"))
    facts = collect(run)
    assert len(facts.metrics) == 601 and len(facts.updates) == 599
    document = compose(facts)
    for form in (html(document), markdown(document)):
        for told in ("2 skipped, 60 trained on; 1 rollbacks", "before another succeeded: 1.", "engine: deepspeed",
                     "step 300: loss nan", "prose/k0, prose/k1, prose/k2, further documents 4", "the disk was full",
                     "The first 50 of 66", "2.5 MB", "3.5 s", "the store was away", "failed attempts to copy"):
            assert told in form, told
        for absent in ("4000000000", "4e9", "4,000,000,000", "checkpoint_copied"):
            assert absent not in form
    for label, told in (("checkpoints copied to an object store", "2"), ("bytes copied", "2.5 MB"),
                        ("time stalled for checkpoints", "1.5 s")):
        assert f"| {label} | {told} |" in markdown(document)
    assert max(max(line.y) for line in block(document, "Loss").series) < 10


@pytest.mark.parametrize("rule, told", [("hash", "by the hash of their text"),
                                        ("tail", "from the end of each source's text")])
def test_how_text_was_held_out_and_what_was_cut_is_told(tmp_path, rule, told):
    run, settings = write_run(tmp_path)
    settings = settings.model_copy(update={"shard": settings.shard.model_copy(update={"heldout_rule": rule})})
    if rule == "tail":
        manifest = read_manifest(run.own_folder("shard"))
        for counts in (manifest.counts, *manifest.counts["sources"].values()):
            counts["cut_in_two"] = 2
        manifest.write(run.own_folder("shard"))
    text = markdown(compose(dataclasses.replace(collect(run), config=settings)))
    assert told in text
    assert ("| source | came in | cut in two | training |" in text) == (rule == "tail")
    assert ("Came in + cut in two = training" in text) == (rule == "tail")


def passed(scale, name):
    return {"documents": 7 * scale, "bytes": 1_234_567 * scale, "changed": 3 * scale,
            "reasons": {f"{name} was <b>too</b> | much": 5 * scale, "no text was left": 2 * scale}}


def test_what_filters_did_is_told_by_name_source_and_reason(tmp_path):
    run, settings = write_run(tmp_path)
    before = html(compose(collect(run)))
    assert "Filters</caption>" not in before
    manifest = read_manifest(run.own_folder("shard"))
    for scale, counts in ((3, manifest.counts), (2, manifest.counts["sources"]["stdlib"]),
                          (1, manifest.counts["sources"]["prose"])):
        counts["filters"] = {name: passed(scale, name) for name in ("length", "Mine")}
        counts["dropped"] |= {"length": 7 * scale, "Mine": 7 * scale}
        counts["documents_in"] += 14 * scale
    manifest.write(run.own_folder("shard"))
    settings = settings.model_copy(update={"shard": settings.shard.model_copy(update={"keep_dropped": True})})
    document = compose(dataclasses.replace(collect(run), config=settings))
    text, page = markdown(document), Page(html(document))
    assert "| source | came in | training | validation | duplicate | empty | length | Mine | unreadable |" in text
    assert "Came in = training + validation + duplicate + empty + length + Mine + unreadable." in text
    for row in ("| length | stdlib | 14 | 2.47 MB | 6 |", "| Mine | prose | 7 | 1.23 MB | 3 |",
                "| Mine | all | 21 | 3.7 MB | 9 |", "| Mine | no text was left | 6 |",
                "| length | length was &lt;b>too&lt;/b> \\| much | 15 |"):
        assert row in text.replace("**", ""), row
    for told in ("225 dropped", "The dropped ones are in shard/dropped", "Mine was <b>too</b> | much"):
        assert told in page.text, told
