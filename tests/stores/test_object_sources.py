"""Sources in an object store: the same shards as of the same files on a disk, or a refusal by name."""

import glob
import gzip
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from contextlib import suppress

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
import zstandard

from pipeline.config.tree import Config
from pipeline.contract.content_hash import OF_BLOCKS
from pipeline.contract.manifest import read_manifest
from pipeline.data import sources, streams
from pipeline.data.reading import unit_documents
from pipeline.errors import UserError
from pipeline.stores import store as stores
from pipeline.stores.object_files import content_number, find, matches
from pipeline.stores.store import Store
from tests.conftest import REPOSITORY, environment
from tests.object_store import SECRET
from tests.stages.test_shard import files_source, folder_of, hashes, run, write_config
from tests.waiting import wait_for

TEXTS = [f"{number} \u2028 " + "word " * (number % 97) + hashlib.sha512(str(number).encode()).hexdigest()
         for number in range(1200)]


def make_files(folder):
    """Files of every kind, some large beside a shard, one of them with a torn end, hidden ones and one in a folder."""
    rows = [json.dumps({"text": text}).encode() + b"\n" for text in TEXTS]
    data = b"".join(rows)

    def named(letter):
        return data.replace(b'": "', b'": "' + letter)
    files = {
        "lines/a.jsonl": data + b'{"text": "cut', "lines/deep/er/b.jsonl": named(b"b")[:20_000],
        "lines/empty.jsonl": b"", "lines/.hidden.jsonl": data,
        "text/a.txt": "\n\n".join("t" + text for text in TEXTS).encode(),
        "frames/a.jsonl.zst": b"".join(zstandard.compress(named(b"z")[at:at + 9000])
                                       for at in range(0, len(data), 9000)),
        "frames/one.jsonl.zst": zstandard.compress(named(b"y")),
        "packed/a.jsonl.gz": gzip.compress(named(b"g"), mtime=0),
        "packed/not.jsonl.gz": b"no gzip at all", "tables/a.csv": b"text\n" + b"".join(
            b'"c%d, ""said"" %s"\n' % (number, b"x" * (number % 50)) for number in range(300)),
        "values/a.json": json.dumps([{"text": "j" + text} for text in TEXTS[:300]]).encode()}
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    (folder / "columns").mkdir()
    table = pa.table({"text": ["p" + text for text in TEXTS], "other": list(range(len(TEXTS)))})
    pq.write_table(table, folder / "columns/a.parquet", row_group_size=100)
    (folder / "columns/a.parquet.gz").write_bytes(gzip.compress((folder / "columns/a.parquet").read_bytes(), mtime=0))
    table = pa.table({"text": ["q" + text for text in TEXTS]})
    with pa.OSFile(f"{folder}/columns/b.arrow", "wb") as out, pa.ipc.new_file(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=100)
    with pa.OSFile(f"{folder}/columns/c.arrow", "wb") as out, pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table.slice(0, 50), max_chunksize=10)


PATTERNS = {"lines": ["lines/**/*.jsonl"], "text": ["text/a.txt"], "frames": ["frames/*"], "packed": ["packed/*.gz"],
            "tables": ["tables/*.csv"], "values": ["values/a.json"],
            "columns": ["columns/*.parquet*", "columns/?.arrow"]}


def config_for(place, root, **settings):
    own = [files_source(name, *(f"{root}/{pattern}" for pattern in patterns),
                        **({"separator": "\n\n"} if name == "text" else {})) for name, patterns in PATTERNS.items()]
    place.mkdir(exist_ok=True)
    return write_config(place, own, **{"shard_mb": 0.02, "heldout_share": 0.1, "max_rejected_share": 0.1, **settings})


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
    monkeypatch.setattr("pipeline.stores.object_files.BEGINNING_BYTES", 15_000)
    monkeypatch.setattr(streams, "BLOCK_BYTES", 8192)
    monkeypatch.setattr("pipeline.contract.external_inputs.BLOCK_BYTES", 8192)
    monkeypatch.setattr("pipeline.contract.content_hash.BLOCK_BYTES", 8192)
    monkeypatch.setattr(sources, "BLOCK_BYTES", 8192)


def same_outputs(one, other):
    """Whether two configurations' shards are the same, and the manifests of both."""
    assert hashes(folder_of(one)) == hashes(folder_of(other))
    found = [read_manifest(folder_of(config)) for config in (one, other)]
    assert found[0].outputs == found[1].outputs and found[0].counts == found[1].counts
    here, there = ({own["name"]: own["sha256"] for own in manifest.files} for manifest in found)
    assert here == there
    return found


def test_shards_are_those_of_the_same_files_on_a_disk(tmp_path, files, checking, small, capsys):
    upload(files, Store(checking.url_of("raw/data")))
    local, remote = config_for(tmp_path / "local", files), config_for(tmp_path / "remote", checking.url_of("raw/data"))
    assert run(local) == 0, capsys.readouterr().err
    assert run(remote) == 0, capsys.readouterr().err
    [here, there] = same_outputs(local, remote)
    assert here.counts["rejected"] >= 1 and any(own["sha256"].startswith(OF_BLOCKS) for own in there.files)
    assert {own["path"] for own in there.files} == {checking.url_of(f"raw/data/{path.relative_to(files)}")
                                                    for path in files.rglob("*") if path.is_file()
                                                    and not path.name.startswith(".")}
    assert run(remote) == 0 and "up to date" in capsys.readouterr().out
    # Whoever touches them without changing them changes nothing; other content is a change.
    upload(files, Store(checking.url_of("raw/data")))
    assert run(remote) == 0 and "up to date" in capsys.readouterr().out
    Store(checking.url_of("raw/data/lines")).put("a.jsonl", b'{"text": "new"}\n')
    assert run(remote) == 2 and "a.jsonl" in capsys.readouterr().err


def test_shards_do_not_depend_on_processes(tmp_path, files, seaweed):
    upload(files, Store(seaweed.url))
    one, two = (config_for(tmp_path / name, seaweed.url) for name in ("one", "two"))
    assert run(one) == 0 and run(two, "launch.processes=2") == 0
    same_outputs(one, two)
    folder = config_for(tmp_path / "folder", f"file://{files}")
    assert run(folder) == 0
    same_outputs(one, folder)


FAULTS = ["error", "slow down", "cut"]


def test_a_store_that_fails_now_and_then_gives_the_same_shards(tmp_path, files, failing, small, capsys):
    upload(files, Store(failing.url))
    local, remote = config_for(tmp_path / "local", files), config_for(tmp_path / "remote", failing.url)
    assert run(local) == 0
    faults = [failing.fail(kind, times=2, method="GET", path=pattern, after=after)
              for after, kind in enumerate(FAULTS)
              for pattern in ("a.jsonl$", "zst", "gz", "parquet", "arrow", "txt", failing.listing)]
    assert run(remote) == 0, capsys.readouterr().err
    same_outputs(local, remote)
    assert sum(fault.met for fault in faults) >= len(faults) and "Listing again" in capsys.readouterr().out


@pytest.mark.parametrize("kind", [*FAULTS, "truncate", "refuse"])
@pytest.mark.parametrize("name", ["lines/a.jsonl", "text/a.txt", "frames/a.jsonl.zst", "packed/a.jsonl.gz",
                                  "columns/a.parquet", "columns/b.arrow", "tables/a.csv", "values/a.json"])
def test_what_a_store_does_not_give_is_an_error_and_never_a_loss(files, moto_server, small, kind, name, monkeypatch):
    """Whichever request it is that fails, of the first few: all documents, or an error that names the object."""
    monkeypatch.setattr("pipeline.stores.clouds.RETRIES", 1)
    Store(moto_server.url).put(name, files / name)
    config = Config(shard={"shard_mb": 0.05, "sources": [files_source(
        "s", moto_server.url_of(name), **({"separator": "\n\n"} if name == "text/a.txt" else {}))]})
    units = [payload for _, payload in sources.reading_units(config.shard, sources.input_files(config))]
    everything, refused = [list(unit_documents(unit)) for unit in units], 0
    assert sum(map(len, everything)) >= 300
    for after in range(4):
        moto_server.server.faults.clear()
        moto_server.fail(kind, times=100_000, method="GET", path=name, after=after)
        for unit, documents in zip(units, everything, strict=True):
            try:
                assert list(unit_documents(unit)) == documents
            except UserError as error:
                assert moto_server.url_of(name) in str(error)
                refused += 1
    assert refused


def test_a_stage_that_could_not_read_goes_on_when_it_can(tmp_path, files, moto_server, small, capsys, monkeypatch):
    monkeypatch.setattr("pipeline.stores.clouds.RETRIES", 1)
    upload(files, Store(moto_server.url))
    local, remote = config_for(tmp_path / "local", files), config_for(tmp_path / "remote", moto_server.url)
    fault = moto_server.fail("slow down", times=100_000, method="GET", path="columns/a.parquet$", after=3)
    assert run(remote) == 2
    said = capsys.readouterr().err
    assert moto_server.url_of("columns/a.parquet") in said and "SlowDown" in said and "Traceback" not in said
    assert not (folder_of(remote) / "manifest.json").exists()
    fault.times = 0
    assert run(remote) == 0 and run(local) == 0, capsys.readouterr().err
    same_outputs(local, remote)


@pytest.mark.parametrize("change", ["other size", "same size", "gone"])
@pytest.mark.parametrize("name", ["lines/a.jsonl", "columns/a.parquet", "frames/a.jsonl.zst", "lines/empty.jsonl"])
def test_an_object_that_changes_under_way_is_refused_by_name(files, seaweed, small, name, change):
    store = Store(seaweed.url)
    store.put(name, files / name)
    entry = store.head(name)
    config = Config(shard={"shard_mb": 0.05, "sources": [files_source("s", seaweed.url_of(name))]})
    units = [payload for _, payload in sources.reading_units(config.shard, sources.input_files(config))]
    undisturbed, reading = list(unit_documents(units[0])), unit_documents(units[0])
    if entry.size:
        next(reading)
    if change == "gone":
        store.delete([name])
    else:
        store.put(name, b"x" * (entry.size + (change == "other size" or not entry.size)))
    with suppress(UserError):  # all of the old content, where all of it was fetched already
        assert list(reading) == undisturbed[1:]
    for documents in map(unit_documents, units):
        with pytest.raises(UserError, match=rf"source s: {seaweed.url_of(name)} .*reads what is there"):
            list(documents)


def test_a_stage_whose_objects_change_under_way_reads_what_is_there_at_its_next_start(tmp_path, files, seaweed, capsys,
                                                                                     monkeypatch):
    store, units, name = Store(seaweed.url), sources.reading_units, "text/a.txt"
    upload(files, store)
    remote, local = config_for(tmp_path / "remote", seaweed.url), config_for(tmp_path / "local", files)

    def changing(*arguments):
        found = units(*arguments)
        (files / name).write_bytes((files / name).read_bytes().replace(b"word", b"WORD"))  # of the same size
        store.put(name, files / name)
        return found
    monkeypatch.setattr("pipeline.shard.reading_units", changing)
    assert run(remote) == 2
    said = capsys.readouterr().err
    assert seaweed.url_of(name) in said and "reads what is there" in said and "Traceback" not in said
    monkeypatch.setattr("pipeline.shard.reading_units", units)
    assert run(remote) == 0 and run(local) == 0, capsys.readouterr().err
    same_outputs(local, remote)


def test_problems_are_told_all_at_once_before_anything_is_queued(tmp_path, files, checking, capsys):
    from launch.submit import main as submit
    scheme = checking.scheme
    upload(files, Store(checking.url))
    config = write_config(tmp_path, [
        files_source("absent", checking.url_of("nothing/*.jsonl")), files_source("nobucket", f"{scheme}://no-such-bucket/x"),
        files_source("prefix", checking.url_of("not/there")), files_source("ending", checking.url_of("lines")),
        files_source("odd", checking.url_of("odd")), files_source(
            "mixed", checking.url_of("text/a.txt"), files / "text/a.txt")])
    Store(checking.url).put("odd/_SUCCESS", b"")
    assert submit(["--stage", "shard", "--config", str(config), "--cluster", "local"]) == 2
    said = capsys.readouterr().err
    for part in (f"source absent: {scheme}://", "no object matches", f" {scheme}://no-such-bucket at this store",
                 "not/there: there is no", "(_SUCCESS) do not tell their format",
                 "source mixed: `paths` has files of this machine and objects"):
        assert part in said, said
    assert "source ending" not in said and not (tmp_path / "runs/a/shard/units").exists()


def test_a_wrong_secret_is_refused_before_anything_is_queued(tmp_path, files, checking, capsys, monkeypatch):
    from launch.submit import main as submit
    upload(files, Store(checking.url))
    config = config_for(tmp_path / "remote", checking.url)
    name, wrong = checking.key
    monkeypatch.setenv(name, wrong)
    assert submit(["--stage", "shard", "--config", str(config), "--cluster", "local"]) == 2
    said = capsys.readouterr().err
    assert said.count(name) == sum(map(len, PATTERNS.values())) and wrong not in said and SECRET not in said
    assert not (folder_of(config) / "units").exists()


def test_finished_work_stands_when_the_store_is_gone(tmp_path, files, seaweed, capsys, monkeypatch):
    upload(files, Store(seaweed.url))
    config = config_for(tmp_path / "remote", seaweed.url)
    assert run(config) == 0
    Store(seaweed.url).delete([entry.path for entry in Store(seaweed.url).list()])
    assert run(config) == 0 and "up to date" in capsys.readouterr().out
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    assert run(config) == 0 and "up to date" in capsys.readouterr().out


def test_killed_at_random_points_it_ends_with_the_same_bytes(tmp_path, files, seaweed):
    upload(files, Store(seaweed.url))
    local, remote = config_for(tmp_path / "local", files), config_for(tmp_path / "remote", seaweed.url)
    assert run(local) == 0
    chance, landed = random.Random(5), 0
    for _ in range(3):
        def done():
            return sum(len(names) for _, _, names in os.walk(folder_of(remote)))
        moment = done() + chance.randint(2, 20)
        process = subprocess.Popen([sys.executable, "-m", "pipeline.shard", "--config", str(remote),
                                    f"launch.processes={chance.randint(1, 3)}"], cwd=REPOSITORY, env=environment(),
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        wait_for(lambda moment=moment, process=process: done() >= moment or process.poll() is not None)
        os.killpg(process.pid, signal.SIGKILL)
        landed += process.wait() < 0
        if (folder_of(remote) / "manifest.json").exists():
            shutil.rmtree(folder_of(remote))
    assert landed
    assert run(remote, "launch.processes=2") == 0
    same_outputs(local, remote)


def test_every_byte_is_fetched_once_and_small_objects_by_one_request(tmp_path, files, moto_server):
    upload(files, Store(moto_server.url))
    patterns = moto_server.url_of("**/*.parquet"), moto_server.url_of("lines")
    config = write_config(tmp_path, [files_source("all", *patterns)], heldout_share=0.1, max_rejected_share=0.1)
    moto_server.seen.clear()
    assert run(config) == 0
    bodies = [path for method, path, asked in moto_server.seen if method == "GET" and asked]
    for name in ("columns/a.parquet", "lines/a.jsonl", "lines/deep/er/b.jsonl"):
        assert len([path for path in bodies if path.endswith(name)]) <= 2, bodies
    sizes = 0
    for method, path, asked in moto_server.seen:
        if method == "GET" and asked and path.endswith("a.parquet"):
            start, stop = asked.removeprefix("bytes=").split("-")
            sizes += int(stop) + 1 - int(start)
    assert sizes == (files / "columns/a.parquet").stat().st_size
    assert yaml.safe_load(config.read_text())["shard"]["sources"][0]["paths"]


@pytest.mark.parametrize("pattern", ["**", "**/*.jsonl", "*", "lines/*", "lines/**", "*/a.*", "**/deep/**/*",
                                     "l*/**/b.jsonl", "lines/.*", "**/.*", "[lt]*/?.*", "lines/**/deep/er/b.jsonl",
                                     "**/**/b.jsonl"])
def test_wildcards_match_as_they_do_on_a_disk(files, pattern):
    there = sorted(path.relative_to(files).as_posix() for path in files.rglob("*") if path.is_file())
    found = glob.glob(pattern, root_dir=files, recursive=True)  # noqa: PTH207 - whose rules are meant
    expected = sorted({path for path in found if (files / path).is_file()})
    assert [path for path in there if matches(path.split("/"), pattern.split("/"))] == expected


def test_a_name_with_wildcards_that_is_there_is_meant(checking):
    store = Store(checking.url)
    for name in ("a[1].txt", "a1.txt", "b/x.txt", "b/.y.txt"):
        store.put(name, b"1")
    assert [found.url for found in find(checking.url_of("a[1].txt"))] == [checking.url_of("a[1].txt")]
    assert [found.name for found in find(checking.url_of("a[12].txt"))] == ["a1.txt"]
    assert [found.name for found in find(checking.url_of("b"))] == ["x.txt"] == \
        [found.name for found in find(checking.url_of("b/"))]
    with pytest.raises(UserError, match="no object"):
        find(checking.url_of("a"))


def test_the_number_of_a_content_follows_the_etag():
    assert content_number('"a"', 1.0) == content_number('"a"', 2.0) != content_number('"b"', 1.0)
    assert content_number("", 1.5) == 1_500_000_000 and content_number('"a"', 0) < 2 ** 48
