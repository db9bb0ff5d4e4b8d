"""Token shards copied to an object store: whole, verified, resumable, the manifest last."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from drover.pipeline.data.shard_table import ShardTable
from drover.pipeline.data.stored.copying import (
    MANIFEST,
    compare_copy,
    copy_shards,
    digest,
    digest_of,
    manifest_bytes,
    note_of,
    survey,
)
from drover.pipeline.errors import UserError
from drover.pipeline.stores.store import Store
from tests.data.stored.made import CLOUDS, make_shards

COUNTS = {"total": {"tokens": 1}, "dtype": "uint16", "vocab_size": 65536, "encoders": "not copied"}


@pytest.fixture
def made(tmp_path):
    """Shards in a folder, a place for them, `copy(...)` and what it is to make of the place."""
    folder = tmp_path / "encode"
    records, url = make_shards(folder), f"file://{tmp_path}/there"

    def copy(to=url, count=6):
        return copy_shards(folder, records[:count], COUNTS, to)
    meant = {record["path"]: (folder / record["path"]).read_bytes() for record in records}
    return SimpleNamespace(folder=folder, records=records, url=url, store=Store(url), copy=copy,
                           meant=meant | {MANIFEST: manifest_bytes(records, COUNTS)})


def objects(url):
    """Path and content of everything in the store."""
    store = Store(url)
    return {entry.path: store.read(entry.path) for entry in store.list()}


@pytest.mark.parametrize("kind", ["file", "moto_server", *CLOUDS])
def test_what_is_there_is_not_sent_again(made, request, kind):
    url = made.url if kind == "file" else request.getfixturevalue(kind).url_of("a/b")
    copied = made.copy(url)
    assert (copied.sent, copied.there) == (6, 0)
    assert copied.sent_bytes == sum(record["bytes"] for record in made.records)
    assert objects(url) == made.meant
    compare_copy(made.records, url)
    again = made.copy(url)
    assert (again.sent, again.sent_bytes, again.there) == (0, 0, 6)
    assert str(again) == "0 token shards sent (0.0 MB), 6 were there already"
    Store(url).put(made.records[1]["path"], bytes(made.records[1]["bytes"]))  # another content of the same size
    with pytest.raises(UserError, match=r"1 shards .*\n?.*text-00001\.arrow: sha256"):
        compare_copy(made.records, url)
    Store(url).delete([made.records[2]["path"]])
    assert made.copy(url).sent == 2 and objects(url) == made.meant


@pytest.mark.parametrize("held", [None, b"{}", b'{"dig'])
def test_shards_that_somebody_may_train_from_are_not_replaced(made, held):
    made.copy(count=4)
    if held is not None:
        made.store.put(MANIFEST, held)
    before = objects(made.url)
    with pytest.raises(UserError, match=r"holds other token shards.*delete file://.*manifest\.json first"):
        made.copy()
    assert objects(made.url) == before
    made.store.delete([MANIFEST])
    assert made.copy().there == 4 and objects(made.url) == made.meant


def test_the_manifest_comes_last_and_is_written_once(made, moto_server):
    fault, url = moto_server.fail("refuse", times=100, method="PUT", path="text-00003"), moto_server.url
    with pytest.raises(UserError, match=r"text-00003\.arrow: write was refused"):
        made.copy(url)
    assert fault.met and MANIFEST not in objects(url)
    with pytest.raises(UserError, match=r"manifest\.json is not there.*tools\.copy_tokens"):
        survey(url, ShardTable.of(made.records), digest(made.records))
    fault.times = fault.met
    moto_server.seen.clear()
    with open(note_of(made.folder, url), "a") as file:
        file.write('{"path": "train/te')  # a torn line, as a power cut leaves it
    copied = made.copy(url)
    assert copied.there >= 3 and copied.sent + copied.there == 6
    put = [path for method, path, _ in moto_server.seen if method == "PUT"]
    assert put[-1].endswith(MANIFEST) and objects(url) == made.meant
    moto_server.seen.clear()
    made.copy(url)
    assert not [path for method, path, _ in moto_server.seen if method == "PUT" and "drover-check" not in path]


def test_a_shard_that_is_not_what_encode_made_is_not_sent(made):
    path = made.folder / made.records[4]["path"]
    data = path.read_bytes()
    for harm, told in ((lambda: path.write_bytes(data[:-1] + b"x"), "is not what the stage encode made"),
                       (path.unlink, "cannot be read")):
        harm()
        with pytest.raises(UserError, match=rf"text-00004\.arrow {told}"):
            made.copy()
    assert MANIFEST not in objects(made.url)


def test_a_place_that_does_not_have_these_shards_is_refused(made):
    records, table = made.records, ShardTable.of(made.records)
    made.copy()
    assert digest_of(table) == digest(records) and len(survey(made.url, table, digest(records))) == 6
    other = [*records[:5], {**records[5], "sha256": "0" * 64}]
    with pytest.raises(UserError, match=r"holds other token shards.*1 of 6 differ: train/text-00005\.arrow"):
        survey(made.url, ShardTable.of(other), digest(other))
    made.store.put(records[0]["path"], b"cut")
    made.store.delete([records[1]["path"]])
    with pytest.raises(UserError, match=r"2 of 6 token shards") as refused:
        survey(made.url, table, digest(records))
    assert all(text in str(refused.value) for text in ("00000.arrow has 3 bytes instead", "00001.arrow is missing"))
    made.store.put(MANIFEST, b"{}")
    with pytest.raises(UserError, match="is not a manifest of token shards"):
        survey(made.url, table, digest(records))
