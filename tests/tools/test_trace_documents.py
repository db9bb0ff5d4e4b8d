"""Which steps saw a document: what the steps say of their documents, turned round."""

import json
import random
import re
import shlex
from collections import defaultdict

import pytest

from drover.pipeline.contract.manifest import read_manifest
from drover.pipeline.contract.run import run_in
from drover.pipeline.data.text_shards import read_shard, shard_records
from drover.tools.trace.__main__ import main
from drover.tools.trace.tracing import Search
from tests.conftest import slow
from tests.refusal import printed, table
from tests.tools.recorded import Recorded
from tests.tools.traced import PLANNED, make_traced


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    return make_traced(tmp_path_factory.mktemp("traced"))


PHASES = """train.phases=[{until: 9216, sequence_length: 32, mixture: {web: 1, notes: 6}},
{until: 16128, sequence_length: 24, batch_tokens: 768, mixture: {web: 1, notes: 0}},
{until: 25344}, {until: 34560, sequence_length: 128, mixture: {web: 1, notes: 4}}]"""
"""Nine steps each. Sequences of 24 tokens fit no grain, which is of 128: that phase reads its source anew, unless
documents are packed."""
PACKED = "train.packing=best_fit"
ORDERS = {"mixture": (("train.mixture={web: 1, notes: 3}",), (192, 368)),
          "phases": (("train.steps=null", PHASES), (256, 672)),
          "packed phases": (("train.steps=null", PHASES, PACKED), (256, 672))}
"""Settings, and the first samples of two steps that are undone; with phases, one is the last of its phase."""


@pytest.fixture(scope="module", params=["mixture", *slow("phases", "packed phases")])
def recorded(request, tmp_path_factory, traced):
    """30 of 36 steps, of which step 8 skipped its update and two were undone by rollbacks."""
    settings, spikes = ORDERS[request.param]
    return Recorded(tmp_path_factory.mktemp("backwards") / "mini", traced, settings=settings, spikes=spikes)


def answer(capsys, recorded, *arguments, expect=0):
    capsys.readouterr()
    assert main(["--run", str(recorded.folder), "--json", *arguments]) == expect
    output = capsys.readouterr()
    return json.loads(output.out) if expect == 0 else output.err


def test_documents_to_steps_is_steps_to_documents_turned_round(capsys, recorded, request):
    seen = defaultdict(set)
    for step in range(1, PLANNED + 1):
        for piece in answer(capsys, recorded, "--step", str(step))["pieces"]:
            seen[piece["key"]].add((step, piece["sample"], *piece["tokens"]))
    search = Search(run_in(recorded.folder))
    steps = search.steps
    order = steps.history.data.order
    undone = {rollback.samples[0][0]: rollback for rollback in steps.history.rollbacks}
    assert list(undone) == list(ORDERS[request.node.callspec.params["recorded"]][1])
    for rollback in undone.values():
        for piece in answer(capsys, recorded, "--samples", *map(str, rollback.samples[0]))["pieces"]:
            seen[piece["key"]].add((rollback.step, piece["sample"], *piece["tokens"]))
    left_out = {sample for rollback in undone.values() for samples in rollback.samples for sample in range(*samples)}
    assert max(order.epochs(steps.end).values()) > 2, "some documents are read several times"
    reads_anew, readings = steps.phases.declared and not steps.history.data.packings, []
    for key in random.Random(2).sample(sorted(seen), 60):
        [document] = search.traced(search.with_key(key), text=False)
        readings += document.readings
        assert {(one.step, one.sample, *one.tokens) for one in document.readings} == seen[key]
    for one in readings:
        assert one.what == ("left out" if one.sample in left_out else "skipped" if one.step == 8 else
                            "to come" if one.step > 30 else "trained")
        assert one.own_phase == (2 if reads_anew and 10 <= one.step <= 18 else None)
    assert any(one.own_phase for one in readings) == reads_anew
    assert {one.what for one in readings} == {"left out", "skipped", "to come", "trained"}


@pytest.fixture(scope="module")
def plain(tmp_path_factory, traced):
    return Recorded(tmp_path_factory.mktemp("whole") / "mini", traced, kills=(), spikes=(), unsound=())


def test_documents_by_id_and_by_key(capsys, plain, traced):
    [page] = answer(capsys, plain, "--id", "p50")["documents"]
    [at_line] = answer(capsys, plain, "--id", "pages.jsonl:52")["documents"]
    assert at_line == page, "after line 40 is one that is no JSON"
    assert (page["id"], page["place"], page["source"]) == ("p50", "pages.jsonl:52", "web")
    [same] = answer(capsys, plain, "--document", page["key"][:9], "--text")["documents"]
    assert same["text"].startswith("Page 50 says") and same | {"text": None} == page
    shown = printed(capsys, main, "--run", plain.folder, "--id", "notes.txt:8", "--text")
    assert "id notes.txt:8\n    trained on in " in shown and "    | Note 7: " in shown
    text = "".join(path.read_text() for path in (traced.parent / "in").iterdir())
    pieces = answer(capsys, plain, "--samples", "0", "3", "--text")["pieces"]
    for piece in pieces:
        assert len(piece["text"]) > 5 and piece["text"] in text
        [document] = answer(capsys, plain, "--document", piece["key"])["documents"]
        assert [document[name] for name in ("id", "place", "url")] == [piece[name] for name in ("id", "place", "url")]
    shown = printed(capsys, main, "--run", plain.folder, "--samples", "0", "3")
    assert re.search(r"  id p(\d+)  place pages.jsonl:\d+  url https://example.org/\1\n", shown)
    assert re.search(r"  id notes.txt:\d+\n", shown)


def test_several_ids_are_searched_at_once(capsys, plain):
    """Several ids at once: documents that were trained on, documents that were left out, and unknown ids."""
    found = answer(capsys, plain, "--id", "p50", "--id", "p20", "--id", "notes/notes.txt:8", "--id", "p70")
    assert {document["id"] for document in found["documents"]} == {"p50", "notes.txt:8"}
    assert [own["id"] for own in found["left_out"]] == ["p20", "p70"]
    assert "with the id p20x, p50x is" in answer(capsys, plain, "--id", "p50x", "--id", "p3", "--id", "p20x", expect=2)


def test_a_validation_document_and_one_whose_text_is_gone(capsys, tmp_path, plain, traced):
    shard = traced.parent / "runs/mini/shard"
    held = next(read_shard(shard, shard_records(read_manifest(shard), "validation")[0]))
    assert "validation text: no step trains on it" in printed(capsys, main, "--run", plain.folder, "--id", held.id)
    [document] = answer(capsys, plain, "--document", held.key)["documents"]
    assert (document["split"], document["readings"], document["id"]) == ("validation", [], held.id)
    [kept] = answer(capsys, plain, "--id", "p3")["documents"]
    path = (shard / kept["shard"]).with_suffix(".tar")
    path.rename(tmp_path / "aside")
    try:
        [output] = answer(capsys, plain, "--document", kept["key"])["documents"]
        assert output == kept | {"id": None, "place": None, "url": None}
        assert "is missing" in answer(capsys, plain, "--id", "p4", expect=2)
    finally:
        (tmp_path / "aside").rename(path)


@pytest.mark.parametrize(("arguments", "output"), table("""
    --document xyz -> asked: xyz
    --document 00000000 -> No document whose key begins with 00000000
    --id p20x -> No document with the id p20x is in the text shards of
    --id p20x -> rejected.jsonl, dropped/ and duplicates/ there do not name it either
    --id p20x -> Where a source reads the texts of another run, that run may know it""", shlex.split))
def test_what_is_not_there_or_makes_no_sense_is_said(capsys, plain, arguments, output):
    assert output in printed(capsys, main, "--run", plain.folder, *arguments, expect=2)


@pytest.mark.parametrize(("name", "output"), table("""
    p20 -> source web  id p20  place pages.jsonl:21  url https://example.org/20: the filter length dropped it (fewer
    https://example.org/20 -> source web  id p20  place pages.jsonl:21  url https://example.org/20: the filter length
    web/pages.jsonl:21 -> source web  id p20  place pages.jsonl:21  url https://example.org/20: the filter length
    pages.jsonl:21 -> source web  id p20  place pages.jsonl:21  url https://example.org/20: the
    p70 -> source web  id p70  url https://example.org/70: it is a duplicate of p3 of the source web, which is kept;
    https://example.org/70 -> source web  id p70  url https://example.org/70: it is a duplicate of p3 of the source web
    pages.jsonl:41 -> source web  id pages.jsonl:41: it could not be read (the line is not JSON: """))
def test_a_document_that_was_left_out_is_shown_with_the_reason(capsys, plain, name, output):
    assert printed(capsys, main, "--run", plain.folder, "--id", name).startswith(output)
    result = answer(capsys, plain, "--id", name)
    assert result["documents"] == [] and len(result["left_out"]) == 1


def test_a_packing_that_was_not_planned_is_said_and_nothing_is_written(capsys, tmp_path, traced):
    recorded = Recorded(tmp_path / "mini", traced, settings=(PACKED,))
    answers = [answer(capsys, recorded, *question) for question in (("--step", "3"), ("--id", "p3"))]
    next((recorded.train / "packing").rglob("*.bins")).unlink()
    before = sorted(tmp_path.rglob("*"))
    assert answer(capsys, recorded, "--id", "p3") == answers[1]
    main(["--run", str(recorded.folder), "--json", "--step", "3"])
    output = capsys.readouterr()
    assert json.loads(output.out) == answers[0]
    assert "It is made in a temporary folder, for this command only" in output.err
    assert sorted(tmp_path.rglob("*")) == before
