"""Sources in an object store: the same shards as of the same files on a disk, or a refusal by name."""

import glob
import gzip
import hashlib
import itertools
import json
from collections import Counter
from contextlib import suppress

import pytest
import zstandard

from drover.launch.submit import main as submit
from drover.pipeline.contract.inputs import listed_files
from drover.pipeline.contract.manifest import read_manifest
from drover.pipeline.core.errors import UserError
from drover.pipeline.data import sources
from drover.pipeline.data.reading import unit_documents
from drover.pipeline.storage import store as stores
from drover.pipeline.storage.object_files import find, matches
from drover.pipeline.storage.store import Store
from tests.conftest import slow
from tests.data.source_files import batch, config_of, lines, write_batches
from tests.refusal import printed, refused, table
from tests.stages.test_shard import files_source, folder_of, run, write_config

TEXTS = [f"{number} \u2028 " + "word " * (number % 97) + hashlib.sha512(str(number).encode()).hexdigest()
         for number in range(600)]


def make_files(folder):
    """Files of every kind, some large beside a shard, one of them with a torn end, hidden ones and one in a folder."""
    def batches(size):
        return [batch(("text", TEXTS[at:at + size])) for at in range(0, len(TEXTS), size)]
    rows = [{"text": text} for text in TEXTS]
    data = lines(rows)
    files = {
        "lines/a.jsonl": data + b'{"text": "cut', "lines/deep/er/b.jsonl": data[:20_000],
        "lines/empty.jsonl": b"", "lines/.hidden.jsonl": data,
        "text/a.txt": "\n\n".join(TEXTS).encode(),
        "frames/a.jsonl.zst": b"".join(zstandard.compress(data[at:at + 9000]) for at in range(0, len(data), 9000)),
        "frames/one.jsonl.zst": zstandard.compress(data),
        "packed/a.jsonl.gz": gzip.compress(data, mtime=0), "packed/not.jsonl.gz": b"no gzip at all",
        "tables/a.csv": b"text\n" + "".join(f'"{text}, ""said"" "\n' for text in TEXTS[:300]).encode(),
        "values/a.json": json.dumps(rows[:300]).encode()}
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    (folder / "columns").mkdir()
    write_batches(folder / "columns/a.parquet", *batches(100))
    (folder / "columns/a.parquet.gz").write_bytes(gzip.compress((folder / "columns/a.parquet").read_bytes(), mtime=0))
    write_batches(folder / "columns/b.arrow", *batches(100))
    write_batches(folder / "columns/c.arrow", *batches(10)[:5], stream=True)


def config_for(place, root):
    """A source for each folder; they hold the same texts. An encoding is that of text, so not of files of columns."""
    fields = {"text": {"separator": "\n\n"}, "columns": {"encoding": "latin-1"}}
    own = [files_source(name, f"{root}/{name}/**/*", **fields.get(name, {}))
           for name in ("lines", "text", "frames", "packed", "tables", "values", "columns")]
    place.mkdir()
    return write_config(place, own, shard_mb=0.02, validation_share=0.1, max_rejected_share=0.1, drop_duplicates=False)


def upload(folder, store):
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            store.put(path.relative_to(folder).as_posix(), path)


@pytest.fixture
def files(tmp_path):
    make_files(tmp_path / "in")
    return tmp_path / "in"


@pytest.fixture
def small(monkeypatch):
    """Parts and blocks of objects so small that the files here have many of them."""
    monkeypatch.setattr(sources, "LEAST_PART", 100_000)
    monkeypatch.setattr(stores, "BLOCK_BYTES", 60_000)
    monkeypatch.setattr(stores, "LITTLE_BYTES", 20_000)
    monkeypatch.setattr("drover.pipeline.storage.object_files.BEGINNING_BYTES", 15_000)


def same_outputs(one, other):
    """Whether two configurations' shards are the same, and the manifests of both."""
    manifests = [read_manifest(folder_of(config)) for config in (one, other)]
    first, second = ((own.outputs, own.counts, {file["name"]: file["sha256"] for file in own.files})
                     for own in manifests)
    assert first == second
    return manifests


def test_shards_are_those_of_the_same_files_on_a_disk(tmp_path, files, checking, small, capsys):
    url = checking.url_of("raw/data")
    upload(files, Store(url))
    local, remote = config_for(tmp_path / "local", files), config_for(tmp_path / "remote", url)
    assert run(local) == run(remote) == 0
    capsys.readouterr()
    _, manifest = same_outputs(local, remote)
    assert manifest.counts["rejected"] >= 1
    assert {own["path"] for own in manifest.files} == {f"{url}/{path.relative_to(files)}" for path in files.rglob("*")
                                                    if path.is_file() and not path.name.startswith(".")}
    upload(files, Store(url))  # whoever touches them without changing them changes nothing
    assert run(remote) == 0 and "up to date" in capsys.readouterr().out
    Store(url).put("lines/a.jsonl", b'{"text": "new"}\n')
    assert run(remote) == 2 and "a.jsonl" in capsys.readouterr().err
    Store(url).delete([entry.path for entry in Store(url).list()])
    assert run(remote) == 0 and "up to date" in capsys.readouterr().out, "finished work stands when the store is gone"


def units_of(bucket, files, name, **settings):
    """Put a file into a bucket, and plan to read it."""
    Store(bucket.url).put(name, files / name)
    config = config_of(files_source("s", bucket.url_of(name), **settings), shard_mb=0.05)
    return sources.reading_units(config.shard, listed_files(sources.input_files(config)))


@pytest.mark.parametrize("name", ["lines/a.jsonl", "columns/a.parquet", "packed/a.jsonl.gz", *slow(
    "text/a.txt", "frames/a.jsonl.zst", "columns/b.arrow", "tables/a.csv", "values/a.json")])
def test_what_a_store_does_not_give_is_an_error_and_never_a_loss(files, moto_server, small, name, monkeypatch):
    """Whichever request it is that fails, of the first few: all documents, or an error that names the object."""
    monkeypatch.setattr("drover.pipeline.storage.clouds.RETRIES", 1)
    units = units_of(moto_server, files, name, **({"separator": "\n\n"} if name == "text/a.txt" else {}))
    everything, refused = [list(unit_documents(unit)) for unit in units], Counter()
    assert sum(map(len, everything)) >= 300
    for kind, after in itertools.product(("error", "cut", "truncate"), range(4)):
        moto_server.server.faults.clear()
        moto_server.fail(kind, times=100_000, method="GET", path=name, after=after)
        for unit, documents in zip(units, everything, strict=True):
            try:
                assert list(unit_documents(unit)) == documents
            except UserError as error:
                assert moto_server.url_of(name) in str(error)
                refused[kind] += 1
    assert len(refused) == 3


@pytest.mark.parametrize("name", ["lines/a.jsonl", "columns/a.parquet", "frames/a.jsonl.zst", "lines/empty.jsonl"])
def test_an_object_that_changes_under_way_is_refused_by_name(files, moto_server, small, name):
    store = Store(moto_server.url)
    for change in (1, 0, None):  # bytes more, or gone
        units, entry = units_of(moto_server, files, name), store.head(name)
        undisturbed, reading = list(unit_documents(units[0])), unit_documents(units[0])
        if entry.size:
            next(reading)
        if change is None:
            store.delete([name])
        else:
            store.put(name, b"x" * (entry.size + (change or not entry.size)))
        with suppress(UserError):  # all of the old content, where all of it was fetched already
            assert list(reading) == undisturbed[1:]
        for documents in map(unit_documents, units):
            refused(UserError, rf"source s: {moto_server.url_of(name)} .*reads what is there", list, documents)


def test_problems_are_told_all_at_once_before_anything_is_queued(tmp_path, files, checking, capsys):
    nowhere = f"{checking.scheme}://no-such-bucket"
    upload(files, Store(checking.url))
    Store(checking.url).put("odd/_SUCCESS", b"")
    config = write_config(tmp_path, [
        *(files_source(name, checking.url_of(path)) for name, path in (
            ("absent", "nothing/*.jsonl"), ("prefix", "not/there"), ("ending", "lines"), ("odd", "odd"))),
        files_source("nobucket", f"{nowhere}/x"),
        files_source("mixed", checking.url_of("text/a.txt"), files / "text/a.txt")])
    message = printed(capsys, submit, "--stage", "shard", "--config", config, "--cluster", "local", expect=2)
    assert not (folder_of(config) / "units").exists()
    for part in (f"source absent: {checking.scheme}://", "no object matches", f" {nowhere} at this store",
                 "not/there: there is no", "(_SUCCESS) do not show their format",
                 "source mixed: `paths` has files of this machine and objects"):
        assert part in message, message
    assert "source ending" not in message


def test_every_byte_is_fetched_once_and_small_objects_by_one_request(tmp_path, files, moto_server):
    upload(files, Store(moto_server.url))
    patterns = moto_server.url_of("**/*.parquet"), moto_server.url_of("lines")
    config = write_config(tmp_path, [files_source("all", *patterns)], validation_share=0.1, max_rejected_share=0.1)
    moto_server.seen.clear()
    assert run(config) == 0
    for name in ("columns/a.parquet", "lines/a.jsonl", "lines/deep/er/b.jsonl"):
        ranges = [span.removeprefix("bytes=").split("-") for method, path, span in moto_server.seen
                 if method == "GET" and span and path.endswith(name)]
        assert len(ranges) <= 2
        if name.endswith("parquet"):
            assert sum(int(stop) + 1 - int(start) for start, stop in ranges) == (files / name).stat().st_size


@pytest.mark.parametrize(("pattern",), table("""
    **
    **/*.jsonl
    *
    lines/*
    lines/**
    */a.*
    **/deep/**/*
    l*/**/b.jsonl
    lines/.*
    **/.*
    [lt]*/?.*
    lines/**/deep/er/b.jsonl
    **/**/b.jsonl"""))
def test_wildcards_match_as_they_do_on_a_disk(files, pattern):
    paths = sorted(path.relative_to(files).as_posix() for path in files.rglob("*") if path.is_file())
    matching = glob.glob(pattern, root_dir=files, recursive=True)  # noqa: PTH207 - whose rules are meant
    assert [path for path in paths if matches(path.split("/"), pattern.split("/"))] == sorted(
        {path for path in matching if (files / path).is_file()})


def test_a_name_with_wildcards_that_is_there_is_meant(checking):
    store = Store(checking.url)
    for name in ("a[1].txt", "a1.txt", "b/x.txt", "b/.y.txt"):
        store.put(name, b"1")
    for pattern, name in (("a[1].txt", "a[1].txt"), ("a[12].txt", "a1.txt"), ("b", "b/x.txt"), ("b/", "b/x.txt")):
        assert [object_file.url for object_file in find(checking.url_of(pattern))] == [checking.url_of(name)]
    refused(UserError, "no object", find, checking.url_of("a"))
