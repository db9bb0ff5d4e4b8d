"""Token shards in an object store: downloaded once to a node, compared, and continued after a kill."""

import shutil
from types import SimpleNamespace

import numpy as np
import pytest

from drover.pipeline.core.errors import UserError
from drover.pipeline.data.remote_tokens import download_shards, shard_folder, upload_shards
from drover.pipeline.data.token_shards import ShardTable
from drover.pipeline.storage.mirror import COPY
from drover.pipeline.storage.store import Store
from tests.refusal import refused
from tests.token_shards import write_shards


@pytest.fixture
def made(tmp_path, moto_server):
    """Six token shards in a folder and uploaded, and a run's work that downloads them."""
    folder, url = tmp_path / "encode", moto_server.url_of("tokens")
    records = write_shards(folder, [(f"train/text-{number:05d}", [np.arange(50) + 1000 * number + document
                                                                  for document in range(20)]) for number in range(6)])
    upload_shards(folder, records, url)
    train = SimpleNamespace(tokens_from=url, tokens_folder=str(tmp_path / "node"))
    work = SimpleNamespace(name="train", config=SimpleNamespace(train=train), input=lambda stage: (folder, None))
    table = ShardTable.of(records)
    return SimpleNamespace(folder=folder, records=records, table=table, work=work, train=train, store=Store(url),
                           there=shard_folder(work, table))


def download(made, rows=range(6)):
    download_shards(made.work, made.table, rows)


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.arrow")}


def test_they_are_downloaded_once_and_without_a_store_the_stage_s_own_files_are_read(made, moto_server, capsys):
    download(made)
    assert contents(made.there) == contents(made.folder)
    assert f"train     token shards to {made.there}: 6/6 shards" in capsys.readouterr().out
    assert made.there.stat().st_mode & 0o777 == 0o700
    requests = len(moto_server.seen)
    download(made)
    assert len(moto_server.seen) == requests
    made.train.tokens_from = None
    download(made)
    assert shard_folder(made.work, made.table) == made.folder


def test_a_killed_download_continues_with_what_is_missing_or_cut(made, monkeypatch, capsys):
    download(made, [0, 1, 2])
    (made.there / made.records[1]["path"]).write_bytes(b"cut")
    (made.there / "train/.text-00003.arrow-1.tmp").write_bytes(b"of the killed process")
    fetched, fetch = [], Store.fetch
    monkeypatch.setattr(Store, "fetch", lambda store, path, to: fetched.append(path) or fetch(store, path, to))
    download(made)
    assert sorted(fetched) == [made.records[row]["path"] for row in (1, 3, 4, 5)]
    assert contents(made.there) == contents(made.folder) and not list(made.there.rglob("*.tmp"))


def test_a_shard_with_another_hash_is_refused_and_does_not_stay(made):
    path = made.records[2]["path"]
    data = bytearray((made.folder / path).read_bytes())
    data[-1] ^= 1
    made.store.put(path, bytes(data))
    refused(UserError, rf"{path} has other content.*upload the run's shards again", download, made)
    assert not (made.there / path).exists()
    made.store.put(path, (made.folder / path).read_bytes())
    download(made)
    assert contents(made.there) == contents(made.folder)


def test_a_place_without_the_run_s_shards_is_refused(made, tmp_path):
    other = ShardTable.of([*made.records[:5], {**made.records[5], "sha256": "0" * 64}])
    refused(UserError, r"holds other token shards.*1 of 6 differ: train/text-00005\.arrow", download_shards, made.work,
            other, range(6))
    made.store.put(COPY, b"{}")
    refused(UserError, r"copy\.json is damaged", download, made)
    made.store.delete([COPY])
    refused(UserError, r"copy\.json is not there.*drover copy-tokens", download, made)
    refused(UserError, "holds files of the token shards", upload_shards, made.folder, made.records[:4], made.store.url)


def test_a_full_disk_is_refused_with_both_figures_before_anything_is_fetched(made, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1_000_000))
    monkeypatch.setattr(ShardTable, "record", lambda _, row: {**made.records[row], "bytes": 2_000_000_000})
    refused(UserError, r"have 12\.000 GB, but 0\.001 GB are free there.*train\.tokens_folder", download, made)
    assert not contents(made.there)


def test_a_folder_that_is_somebody_else_s_or_none_is_refused(made, tmp_path):
    made.there.parent.mkdir()
    made.there.symlink_to(tmp_path)
    refused(UserError, "does not belong to you", download, made)
    made.there.unlink()
    made.there.write_text("a file")
    refused(UserError, r"cannot be kept in .*Give a train\.tokens_folder", download, made)
