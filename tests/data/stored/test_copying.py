"""Token shards copied to an object store: whole, verified, resumable, the manifest last."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from pipeline.data.shard_table import ShardTable
from pipeline.data.stored import copying
from pipeline.data.stored.copying import MANIFEST, compare_copy, copy_shards, digest, digest_of, manifest_bytes, survey
from pipeline.errors import UserError
from pipeline.stores.store import Store
from tests.conftest import REPOSITORY
from tests.data.stored.made import make_shards
from tests.waiting import wait_for

COUNTS = {"total": {"tokens": 1}, "dtype": "uint16", "vocab_size": 65536, "encoders": "not copied"}


@pytest.fixture
def made(tmp_path):
    return tmp_path / "encode", make_shards(tmp_path / "encode")


def objects(url):
    """Path and content of everything in the store."""
    store = Store(url)
    return {entry.path: store.read(entry.path) for entry in store.list()}


def meant(folder, records):
    return {record["path"]: (folder / record["path"]).read_bytes() for record in records} | {
        MANIFEST: manifest_bytes(records, COUNTS)}


@pytest.mark.parametrize("kind", ["seaweed", "moto_server", "google", "azurite", "file"])
def test_what_is_there_is_not_sent_again(made, tmp_path, request, kind):
    folder, records = made
    url = f"file://{tmp_path}/there" if kind == "file" else request.getfixturevalue(kind).url_of("a/b")
    copied = copy_shards(folder, records, COUNTS, url)
    assert (copied.sent, copied.there) == (6, 0) and copied.sent_bytes == sum(record["bytes"] for record in records)
    assert objects(url) == meant(folder, records)
    compare_copy(records, url)
    again = copy_shards(folder, records, COUNTS, url)
    assert (again.sent, again.sent_bytes, again.there) == (0, 0, 6)
    assert str(again) == "0 token shards sent (0.0 MB), 6 were there already"
    Store(url).put(records[1]["path"], bytes(records[1]["bytes"]))  # another content of the same size
    Store(url).delete([records[2]["path"]])
    assert copy_shards(folder, records, COUNTS, url).sent == 2 and objects(url) == meant(folder, records)


@pytest.mark.parametrize("held", ["other", "nothing", "torn"])
def test_shards_that_somebody_may_train_from_are_not_replaced(made, tmp_path, held):
    folder, records = made
    url = f"file://{tmp_path}/there"
    copy_shards(folder, records[:4], COUNTS, url)
    if held != "other":
        Store(url).put(MANIFEST, b"{}" if held == "nothing" else b'{"dig')
    before = objects(url)
    with pytest.raises(UserError, match=r"holds other token shards.*delete file://.*manifest\.json first"):
        copy_shards(folder, records, COUNTS, url)
    assert objects(url) == before
    Store(url).delete([MANIFEST])
    assert copy_shards(folder, records, COUNTS, url).there == 4 and objects(url) == meant(folder, records)


def test_the_manifest_comes_last_and_is_written_once(made, moto_server):
    folder, records = made
    fault = moto_server.fail("refuse", times=100, method="PUT", path="text-00003")
    with pytest.raises(UserError, match=r"text-00003\.arrow: write was refused"):
        copy_shards(folder, records, COUNTS, moto_server.url)
    assert fault.met and MANIFEST not in objects(moto_server.url)
    with pytest.raises(UserError, match=r"manifest\.json is not there.*tools\.copy_tokens"):
        survey(moto_server.url, ShardTable.of(records), digest(records))
    fault.times = fault.met
    moto_server.seen.clear()
    assert copy_shards(folder, records, COUNTS, moto_server.url).sent < 6
    put = [path for method, path, _ in moto_server.seen if method == "PUT"]
    assert put[-1].endswith(MANIFEST) and objects(moto_server.url) == meant(folder, records)
    moto_server.seen.clear()
    copy_shards(folder, records, COUNTS, moto_server.url)
    assert not [path for method, path, _ in moto_server.seen if method == "PUT" and "drover-check" not in path]


def test_a_copy_that_was_killed_goes_on_and_gives_the_same_objects(made, moto_server):
    folder, records = made
    moto_server.fail("delay", times=100, method="PUT", path="0000[3-5]", seconds=3.0)
    (folder / "records.json").write_text(json.dumps([records, COUNTS]))
    program = ("import json, sys; from pathlib import Path; from pipeline.data.stored import copying;"
               "copying.AT_ONCE = 1; folder = Path(sys.argv[1]);"
               "copying.copy_shards(folder, *json.loads((folder / 'records.json').read_text()), sys.argv[2])")
    process = subprocess.Popen([sys.executable, "-c", program, str(folder), moto_server.url], cwd=REPOSITORY)
    note = copying.note_of(folder, moto_server.url)
    wait_for(lambda: note.is_file() and len(note.read_text().splitlines()) >= 3, lambda: "some are sent", of=process)
    process.kill()
    process.wait()
    moto_server.server.faults.clear()
    with open(note, "a") as file:
        file.write('{"path": "train/te')  # a torn line, as a power cut leaves it
    assert MANIFEST not in objects(moto_server.url)
    copied = copy_shards(folder, records, COUNTS, moto_server.url)
    assert copied.there >= 3 and copied.sent + copied.there == 6
    assert objects(moto_server.url) == meant(folder, records)


def test_a_shard_that_is_not_what_encode_made_is_not_sent(made, tmp_path):
    folder, records = made
    data = bytearray((folder / records[4]["path"]).read_bytes())
    data[-1] ^= 1
    (folder / records[4]["path"]).write_bytes(data)
    with pytest.raises(UserError, match=r"text-00004\.arrow is not what the stage encode made"):
        copy_shards(folder, records, COUNTS, f"file://{tmp_path}/there")
    (folder / records[4]["path"]).unlink()
    with pytest.raises(UserError, match=r"text-00004\.arrow cannot be read"):
        copy_shards(folder, records, COUNTS, f"file://{tmp_path}/there")
    assert MANIFEST not in objects(f"file://{tmp_path}/there")


def test_a_copy_with_other_content_is_found_when_it_is_read_back(made, tmp_path):
    folder, records = made
    url = f"file://{tmp_path}/there"
    copy_shards(folder, records, COUNTS, url)
    Store(url).put(records[1]["path"], bytes(records[1]["bytes"]))
    with pytest.raises(UserError, match=r"1 shards .*\n?.*text-00001\.arrow: sha256"):
        compare_copy(records, url)


def test_a_place_that_does_not_have_these_shards_is_refused(made, tmp_path):
    folder, records = made
    url, table = f"file://{tmp_path}/there", ShardTable.of(records)
    copy_shards(folder, records, COUNTS, url)
    assert digest_of(table) == digest(records) and len(survey(url, table, digest(records))) == 6
    other = [*records[:5], {**records[5], "sha256": "0" * 64}]
    with pytest.raises(UserError, match=r"holds other token shards.*1 of 6 differ: train/text-00005\.arrow"):
        survey(url, ShardTable.of(other), digest(other))
    Store(url).put(records[0]["path"], b"cut")
    Store(url).delete([records[1]["path"]])
    with pytest.raises(UserError, match=r"2 of 6 token shards") as refused:
        survey(url, table, digest(records))
    assert all(text in str(refused.value) for text in ("00000.arrow has 3 bytes instead", "00001.arrow is missing"))
    Store(url).put(MANIFEST, b"{}")
    with pytest.raises(UserError, match="is not a manifest of token shards"):
        survey(url, table, digest(records))
