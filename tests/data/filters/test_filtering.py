"""Filters in the shard stage: counts that add up, drops kept on request, filters of one's own, and runs of before there
were filters."""

import hashlib
import io
import json
import os
import re
import sys
from collections import Counter
from contextlib import redirect_stdout
from types import SimpleNamespace

import pytest

from drover.pipeline.config.explaining import explain
from drover.pipeline.config.loading import load_config
from drover.pipeline.config.shipped import FILTERS
from drover.pipeline.contract.manifest import read_manifest
from drover.pipeline.core.errors import UserError
from drover.pipeline.data.documents import Document
from tests.conftest import REPOSITORY, run_python, run_stage
from tests.data.source_files import write_jsonl
from tests.refusal import table
from tests.stages.test_shard import documents, files_source, finished, folder_of, hashes, run, write_config

CHAIN = [{"kind": "masking"}, {"kind": "length", "min_characters": 20}, {"kind": "length", "name": "long",
         "max_words": 40}, {"kind": "repetition"}]


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A finished stage: two sources of texts of which each filter drops some, which the masks make equal or different,
    in many small units and shards; what filters drop is kept. Its config, manifest, what it kept and dropped, said."""
    place = tmp_path_factory.mktemp("filtering")
    for source in ("web", "books"):
        for number in range(6):
            write_jsonl(place / source / f"{number}.jsonl", [{"text": text} for text in [
                f"{source} {number} {row} " + "lorem " * (row % 60) + ("\nagain and again" * 9) * (row % 7 == 0)
                + f" u{number}.{row}@example.org" * (row % 5 == 0) for row in range(100)] + [
                    f"the same text but for the address a{number}{source}@example.org", "short", " \n"]])
    sources = [files_source(name, place / name / "*.jsonl") for name in ("web", "books")]
    config = write_config(place, sources, shard_mb=0.02, validation_share=0.1, filters=CHAIN, keep_dropped=True)
    with redirect_stdout(io.StringIO()) as logged:
        counts = finished(config).counts
    folder = folder_of(config)
    dropped = [json.loads(line) for path in (folder / "dropped").iterdir() for line in path.read_text().splitlines()]
    return SimpleNamespace(config=config, folder=folder, counts=counts, dropped=dropped, hashes=hashes(folder),
                           logged=logged.getvalue())


def test_counts_add_up_and_are_printed(done):
    counts = done.counts
    for source, own in (*counts["sources"].items(), (None, counts)):
        aside = [line for line in done.dropped if source in (None, line["source"])]
        for name, passed in own["filters"].items():
            mine = [line for line in aside if line["filter"] == name]
            assert own["dropped"][name] == passed["documents"] == len(mine)
            assert passed["bytes"] == sum(len(line["text"].encode()) for line in mine)
            assert passed["reasons"] == Counter(line["reason"] for line in mine)
    dropped = counts["dropped"]
    assert counts["documents_in"] == 2 * 6 * 103 and min(dropped["repetition"], dropped["long"], dropped["length"]) > 5
    assert sum(card["documents"] for card in counts["cards"].values()) == sum(
        counts[split] for split in ("train", "validation")) + dropped["duplicate"]
    assert dropped["duplicate"] == 11  # equal once they are masked, over files and sources
    assert counts["filters"]["masking"] == {"documents": 0, "bytes": 0, "changed": 2 * 6 * 21, "reasons": {}}
    assert f"filter long: {dropped['long']:,} documents (" in done.logged and "252 changed" in done.logged


def test_the_manifest_has_a_card_of_each_source_and_its_examples_change_no_shard(done):
    reasons = done.counts["cards"]["books"]["examples"]["length"]
    assert reasons["fewer than 20 characters"][0] == {"id": "0.jsonl:2", "text": "books 0 1 lorem "}
    made = finished(done.config, "shard.dropped_examples=0", name="d")
    report = folder_of(done.config, "d").parent / "report"
    assert made.counts["cards"]["books"]["examples"] == {} and hashes(folder_of(done.config, "d")) == done.hashes
    report.mkdir()
    made.write(report)
    assert run(done.config, "name=d", "shard.dropped_examples=1", "--force") == 0
    assert read_manifest(report) is None, "it shows what was dropped as well"


MINE = '''
from dataclasses import replace
from pydantic import model_validator
from drover.plugins import Document, Field, Filter

class Bare(Filter):
    """Lacks its method."""

class Mine(Filter):
    """Drops what holds a word, and writes another large."""
    word: str
    """The word."""
    large: int = Field(0, ge=0)
    """How many letters to write large."""
    unexplained: list[str] = Field(default_factory=list)

    @model_validator(mode="after")
    def _together(self):
        if self.large > len(self.word):
            raise ValueError("the word is shorter than what is written large")
        return self

    def __call__(self, document: Document) -> Document | str:
        if self.word in document.text:
            return "holds the word"
        if document.text == "fail":
            raise RuntimeError("out of order")
        if document.text == "none":
            return None
        if document.text == "void":
            return replace(document, text=" ")
        if document.text == "stolen":
            return replace(document, source="other")
        return replace(document, text=document.text[:self.large].upper() + document.text[self.large:])
'''


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A config with a filter from a module that lies beside it."""
    (tmp_path / "my_filters.py").write_text(MINE)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "f.txt").write_text("|".join(["bad one", "void", *(f"text {number}" for number in range(30))]))
    yield write_config(tmp_path, [files_source("s", tmp_path / "f.txt", separator="|")], validation_share=0.3,
                       filters=[{"kind": "my_filters:Mine", "word": "bad", "large": 1}])
    sys.modules.pop("my_filters", None)


def in_a_process(config, *overrides):
    """What the stage says in a process of its own."""
    return run_stage("shard", config, *overrides, PYTHONPATH=f"{REPOSITORY}{os.pathsep}{config.parent}").stdout


def test_an_external_filter_is_used_and_recorded_with_its_code(mine, capsys, monkeypatch):
    output = in_a_process(mine)
    assert "filters of the module my_filters are not Drover's" in output and "filter Mine: 2 documents" in output
    manifest = read_manifest(folder_of(mine))
    assert manifest.counts["filters"]["Mine"] == {"documents": 2, "bytes": 11, "changed": 30, "reasons": {
        "holds the word": 1, "no text was left": 1}}
    assert {document.text for document in documents(mine, "train")} <= {f"Text {number}" for number in range(30)}

    def stop(*given):
        raise UserError("stopped after the first pass")
    with monkeypatch.context() as patch:
        patch.setattr("drover.pipeline.shard._refuse", stop)
        assert run(mine, "name=b") == 2
    own = mine.parent / "my_filters.py"
    assert manifest.code["my_filters"] == hashlib.sha256(own.read_bytes()).hexdigest()
    own.write_text(MINE.replace("holds the word", "has the word"))
    assert run(mine) == 0
    out = capsys.readouterr().out
    assert "up to date" in out and "the code has changed since (my_filters)" in out
    in_a_process(mine, "name=b")
    reasons = read_manifest(folder_of(mine, "b")).counts["filters"]["Mine"]["reasons"]
    assert "has the word" in reasons, "units are read again by other code"


def test_the_filters_that_the_docs_show_are_filters(tmp_path, mine):
    """The list, and the class of one's own, of docs/data.md."""
    page = (REPOSITORY / "docs/data.md").read_text().partition("## Filters")[2]
    shown, own = (re.search(rf"```{language}\n(.*?)```", text, re.DOTALL)[1] for language, text in (
        ("yaml", page), ("python", page.partition("## A filter of your own")[2])))
    mine.write_text(shown)
    assert len(load_config(mine).shard.filters) == 5
    (tmp_path / "my_filters.py").write_text(own)
    [questions] = FILTERS.made([FILTERS.read({"kind": "my_filters:Questions", "max_questions": 5})])
    assert [questions(Document("?" * count, "s", "1", {})) == "too many questions" for count in (5, 6)] == [False, True]


@pytest.mark.parametrize(("text", "logged"), table("""
    fail -> RuntimeError: out of order
    none -> TypeError: it returned a NoneType, not a document
    stolen -> ValueError: it changed the document's source or id"""))
def test_a_filter_that_fails_ends_the_stage_and_names_the_document(mine, capsys, text, logged):
    (mine.parent / "f.txt").write_text(f"one|two|{text}|three")
    assert run(mine) == 2
    error = capsys.readouterr().err
    assert f"The filter Mine of shard.filters fails on the document f.txt:3 of the source s: {logged}" in error
    assert re.search(r"\(\w+\.py:\d+\)\. Correct", error), "and where it failed"
    assert "what was read so far is then read again" in error
    assert read_manifest(folder_of(mine)) is None


@pytest.mark.parametrize(("wrong", "logged"), table("""
    my_filters:Mine, wrod: 1, large: -1 -> unknown key 'shard.filters.0.wrod'; did you mean 'word'?
    my_filters:Mine, wrod: 1, large: -1 -> 'shard.filters.0.large' is -1 (int): input should be greater than or equal to
    my_filters:Document -> it must be a class that extends drover.pipeline.data.filters.base.Filter
    my_filters:Mine, word: bad, large: 4 -> 'shard.filters.0': the word is shorter than what is written large.
    my_filters:Bare -> shard.filters.0.kind names my_filters:Bare, which has no method __call__: a filter needs it.
    my_filters:Mime -> (AttributeError: module 'my_filters' has no attribute 'Mime')
    no_such_module:X -> shard.filters.0.kind names no_such_module:X"""))
def test_a_wrong_external_filter_is_refused_before_anything_starts(mine, capsys, wrong, logged):
    from drover.launch.submit import main
    override = f"shard.filters=[{{kind: {wrong}}}]"
    assert main(["--stage", "shard", "--config", str(mine), "--cluster", "local", "name=c", override]) == 2
    assert run(mine, override) == 2
    error = capsys.readouterr().err
    assert error.count(logged) >= 2, error
    assert not (mine.parent / "runs/c").exists()


def test_explain_shows_the_settings_of_an_external_filter_and_imports_it_only_then(mine):
    config = load_config(mine)
    assert "configured: 'my_filters:Mine'" in explain(config, "shard") and "my_filters" not in sys.modules
    settings = explain(config, "shard.filters.0")
    for text in ("shard.filters.0.large\n  How many letters to write large.\n  type: int, ge=0   default: 0   "
                 "configured: 1", "shard.filters.0.sources\n  Names of the sources whose documents",
                 "default: required   configured: 'bad'",
                 "(no text stands under it)\n  type: list[str]   default: []   configured: []"):
        assert text in settings, settings
    assert explain(config, "shard.filters.0.large") in settings


@pytest.mark.slow
def test_looking_at_a_run_imports_nothing_that_its_configuration_names(tmp_path):
    (tmp_path / "trap.py").write_text("raise SystemExit('executed')\n")
    config = write_config(tmp_path, [files_source("s", tmp_path / "trap.py", format="txt")],
                          filters=[{"kind": "trap:Trap", "x": [1]}])
    result = run_python("-m", "drover", "why", "shard", "--config", config, check=False,
                        PYTHONPATH=str(tmp_path))
    assert result.returncode == 0 and "shard: absent" in result.stdout, result.stdout + result.stderr
