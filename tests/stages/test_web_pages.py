"""The stage shard on HTML and WARC files: the same bytes after a kill, every record accounted for, and old settings."""

from importlib.util import find_spec

import pytest

from drover.pipeline.config.data import FilesSource
from drover.pipeline.config.section import identity
from drover.pipeline.core import errors
from tests.data.reading.test_warc import OTHERS, archive
from tests.data.source_files import write_jsonl
from tests.stages.test_shard import files_source, finished, run, write_config


@pytest.fixture
def crawl(tmp_path):
    """A config of a source of WARC files, HTML files and records with HTML, in several units."""
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(3):
        pages = [(f"{number}/{page}", f"<title>t</title><p>page {number} {page}</p>".encode(), "text/html", {})
                 for page in range(70)]
        (folder / f"{number}.warc.gz").write_bytes(archive(*pages, *OTHERS))
        (folder / f"{number}.html").write_text(f"<p>file {number}</p>")
    write_jsonl(folder / "a.jsonl", [{"text": f"<p>record {number}</p>"} for number in range(70)])
    source = files_source("web", folder / "*", html="fields", meta_fields=["url", "title"])
    return write_config(tmp_path, [source], shard_mb=0.001,
                        validation_share=0.2)


def test_every_record_is_accounted_for(crawl, capsys):
    counts = finished(crawl).counts
    assert counts["documents_in"] == 3 * 70 + 3 + 70 and counts["rejected"] == 0
    assert counts["sources"]["web"]["passed_over"] == {
        "of type request": 3 * 72, "of type warcinfo": 3, "with HTTP status 404": 3,
        "with content of type image/png": 3}
    assert counts["cards"]["web"]["fields"] == {"url": {"in": 210, "of": 283}, "title": {"in": 210, "of": 283}}
    line = "of 435 records of WARC files 210 are pages; passed over are 216 of type request, 3 of type warcinfo"
    assert line in capsys.readouterr().out and any(line in own for own in counts["remarks"]["web"])


def test_a_missing_package_is_named_before_anything_is_read(crawl, monkeypatch, capsys):
    monkeypatch.setattr(errors, "find_spec", lambda name: None if name == "fastwarc" else find_spec(name))
    assert run(crawl) == 2
    assert "the source web needs the package fastwarc, which is not installed here: `pip" in capsys.readouterr().err


def test_what_finished_runs_are_made_of_is_the_same_as_before():
    without, keeping = (identity(FilesSource(kind="files", name="a", paths=["a"], **old))
                        for old in ({}, {"html": "keep"}))
    assert "html" not in without and "extractor" not in without
    assert keeping == {**without, "html": "keep"}
