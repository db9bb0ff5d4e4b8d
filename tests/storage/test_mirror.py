"""Copies in a store: whole or none at each moment, one owner's, sent and fetched by hash."""

import json
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path

import pytest

from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import Ledger, output_record
from drover.pipeline.storage.mirror import COPY, OWNER, DamagedCopyError, Mirror, Owner, copy_files
from drover.pipeline.storage.store import Missing, Store
from tests.refusal import refused


@pytest.fixture
def store(tmp_path):
    return Store(f"file://{tmp_path}/store")


@pytest.fixture
def files(tmp_path):
    """A folder of seven files, and their records."""
    folder = tmp_path / "here"
    (folder / "deeper").mkdir(parents=True)
    for number in range(7):
        (folder / ("deeper" if number % 2 else ".") / f"{number}.bin").write_bytes(bytes([number]) * 1000 * number)
    return folder, [output_record(folder, path) for path in sorted(folder.rglob("*.bin"))]


@pytest.fixture
def copy(store, files, tmp_path):
    """Function: copy so many of the files, under a name."""
    def copied(count=7, name="mini", url=store.url, ledger="ledger"):
        return copy_files(url, name, str(count), files[0], files[1][:count], ledger=Ledger(tmp_path / ledger))
    return copied


def objects(store):
    """Path and content of all files of a copy."""
    return {entry.path: store.read(entry.path) for entry in store.list() if entry.path not in (OWNER, COPY)}


def meant(folder, records):
    return {record["path"]: (folder / record["path"]).read_bytes() for record in records}


def test_what_is_there_is_not_sent_again(store, files, copy):
    """By its ETag, which test_store.py has of each kind of store."""
    assert str(copy()) == "7 files sent (0.0 MB), 0 were there already"
    assert objects(store) == meant(*files)
    Mirror(store).compare(files[1], lambda: None)
    assert (copy().sent, copy(ledger="lost").sent) == (0, 0)
    store.put("6.bin", bytes(6000))  # another content of the same size
    refused(UserError, r"6\.bin: sha256", Mirror(store).compare, files[1], lambda: None)
    store.delete(["4.bin"])
    assert copy().sent == 2 and objects(store) == meant(*files)


class Killed(BaseException):
    """The process ends."""


def cut_off(monkeypatch, at):
    """From its write or removal of that number on, counted from 1, the store is out of reach."""
    changes = count(1)

    def dying(original):
        def change(*arguments, **more):
            if next(changes) >= at:
                raise Killed
            return original(*arguments, **more)
        return change
    for name in ("put", "delete"):
        monkeypatch.setattr(Store, name, dying(getattr(Store, name)))


def test_cut_off_before_any_change_a_copy_is_the_old_one_the_new_one_or_none_and_goes_on(
        store, files, copy, monkeypatch, tmp_path):
    """What is to go is named until it is gone; what is somebody else's stays."""
    monkeypatch.setattr("drover.pipeline.storage.mirror.AT_ONCE", 1)
    monkeypatch.setattr("drover.pipeline.storage.mirror.preflight", lambda store: None)
    killed, at = True, 0
    while killed:
        at += 1
        place = Store(store.url_of(str(at)))
        copy(7, url=place.url)
        place.put("README.md", b"somebody else's")
        (files[0] / "0.bin").write_bytes(b"new")
        changed = [output_record(files[0], files[0] / "0.bin"), *files[1][1:3]]
        again = partial(copy_files, place.url, "mini", "new", files[0], changed, ledger=Ledger(tmp_path / "ledger"))
        with monkeypatch.context() as patch, suppress(Killed):
            cut_off(patch, at)
            again()
            killed = False
        with suppress(Missing):
            record = Mirror(place).read()
            Mirror(place).compare(record["files"], lambda: None)
            assert record["of"] in ("7", "new")
        again()
        assert objects(place) == {**meant(files[0], changed), "README.md": b"somebody else's"}
        assert Mirror(place).read()["of"] == "new"
        (files[0] / "0.bin").write_bytes(b"")
    assert at > 5


def test_a_place_of_somebody_else_is_left_as_it_is(store, copy):
    store.put("precious", b"x")
    refused(UserError, r"holds precious and perhaps more, but no owner\.json", copy)
    store.delete(["precious"])
    copy(4)
    before = objects(store)
    refused(UserError, "holds files of mini, not files of other", copy, name="other")
    store.put(OWNER, b'{"format": 1, "name": "mini", "writer": "a", "id": "b"}')
    refused(UserError, "holds checkpoints of mini, not files of mini", copy)
    store.put(OWNER, b"{}")
    refused(UserError, "was not written by Drover", copy)
    assert objects(store) == before


def test_a_claim_whose_answer_was_lost_is_ours(store, monkeypatch):
    put = Store.put

    def lost(self, path, data, **condition):
        put(self, path, data, **condition)
        return put(self, path, data, **condition)  # as a client does that has had no answer
    monkeypatch.setattr(Store, "put", lost)
    owner = Owner(store)
    owner.claim(name="mini")
    owner.refuse_lost()


def test_a_process_that_lost_the_place_finishes_no_copy(store, copy, monkeypatch):
    send = Mirror.send

    def meanwhile(self, *arguments):
        Owner(store).claim(name="mini", files=[])
        return send(self, *arguments)
    monkeypatch.setattr(Mirror, "send", meanwhile)
    refused(UserError, "took it over", copy)
    refused(Missing, COPY, Mirror(store).read)


@pytest.mark.parametrize(("change", "message"), [
    (lambda path: path.write_bytes(bytes([9]) * 6000), "is not what was written: sha256"),
    (lambda path: path.write_bytes(b"x"), "has 1 bytes instead of 6,000"), (Path.unlink, "is missing")])
def test_a_file_that_has_changed_since_it_was_written_is_not_sent(store, files, copy, change, message):
    change(files[0] / "6.bin")
    refused(UserError, rf"6\.bin {message}", copy)
    assert store.head("6.bin") is None and store.head(COPY) is None


@pytest.mark.parametrize(("content", "message"), [(None, "is missing"), (bytes([9]) * 6000, "has other content")])
def test_an_object_that_is_not_what_was_put_there_is_named(store, files, copy, tmp_path, content, message):
    copy()
    store.delete(["6.bin"]) if content is None else store.put("6.bin", content)
    refused(DamagedCopyError, rf"6\.bin {message}", Mirror(store).fetch, tmp_path / "there", files[1])


def listing(path):
    return json.dumps({"format": 1, "of": "a", "files": [{"path": path, "bytes": 1, "sha256": "a"}]}).encode()


@pytest.mark.parametrize(("content", "message"), [
    *((listing(path), "no path inside the folder") for path in ("../6.bin", "/x/6.bin", "a/../../6.bin")),
    *((torn, r"copy\.json is damaged") for torn in (
        b"", b"{}", b"[1]", b'{"format": 1, "of": "a", "files": [{"path": "a"}]}'))])
def test_a_list_that_is_torn_or_names_files_outside_of_its_folder_is_damaged(store, content, message):
    store.put(COPY, content)
    refused(DamagedCopyError, message, Mirror(store).read)
