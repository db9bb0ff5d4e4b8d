"""Copies in a store: whole or none at each moment, sent and fetched by hash."""

import json

import pytest

from drover.pipeline.copies.checkpoints import COPY, CopiedCheckpoints
from drover.pipeline.copies.transfer import DamagedCopyError, fetch, send
from drover.pipeline.errors import UserError
from drover.pipeline.files import output_record
from drover.pipeline.stores.store import Store


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


def copy(store, files, step):
    send(store, files[0], f"step-{step:08}/", files[1])
    CopiedCheckpoints(store).finish(step, files[1])


def test_what_is_sent_comes_back_byte_for_byte(store, files, tmp_path):
    copy(store, files, 3)
    copies = CopiedCheckpoints(store)
    assert copies.found().whole == [3] and copies.read(3) == files[1]
    assert fetch(store, "step-00000003/", tmp_path / "there", copies.read(3)) == 1000 * sum(range(7))
    for record in files[1]:
        assert (tmp_path / "there" / record["path"]).read_bytes() == (files[0] / record["path"]).read_bytes()


def test_without_its_last_object_there_is_no_copy(store, files):
    copy(store, files, 3)
    send(store, files[0], "step-00000007/", files[1])
    store.put("step-0000000x/a", b"not ours")
    store.put("other", b"not ours")
    found = CopiedCheckpoints(store).found()
    assert found.whole == [3] and list(found.unfinished) == [7] and len(found.unfinished[7]) == 7


def test_the_newest_and_the_permanent_copies_stay(store, files):
    copies = CopiedCheckpoints(store)
    for step in (4, 8, 12, 16, 20):
        copy(store, files, step)
    assert copies.prune(1, 8) == [4, 12] and copies.found().whole == [8, 16, 20]
    assert copies.prune(2, None) == [8] and copies.found().whole == [16, 20]
    assert not copies.found().unfinished and copies.prune(2, None) == []


def test_a_removal_that_is_cut_short_leaves_no_copy(store, files, monkeypatch):
    copies, removed = CopiedCheckpoints(store), []
    copy(store, files, 4)
    monkeypatch.setattr(Store, "delete", lambda self, paths: removed.append(list(paths)))
    copies.remove(4)
    assert removed[0] == [f"step-00000004/{COPY}"] and len(removed[1]) == 8


def test_a_file_that_has_changed_since_it_was_written_is_not_sent(store, files):
    (files[0] / "6.bin").write_bytes(bytes([9]) * 6000)
    with pytest.raises(UserError, match=r"6\.bin is not what was written"):
        send(store, files[0], "a/", files[1])
    assert store.head("a/6.bin") is None


@pytest.mark.parametrize(("content", "told"), [(None, "is missing"), (b"x", "has 1 bytes instead of 6000"),
                                               (bytes([9]) * 6000, "has other content")])
def test_an_object_that_is_not_what_was_put_there_is_named(store, files, tmp_path, content, told):
    send(store, files[0], "", files[1])
    if content is None:
        store.delete(["6.bin"])
    else:
        store.put("6.bin", content)
    with pytest.raises(DamagedCopyError, match=rf"6\.bin {told}"):
        fetch(store, "", tmp_path / "there", files[1])


@pytest.mark.parametrize("path", ["../6.bin", "/tmp/6.bin", "a/../../6.bin"])
def test_nothing_is_written_outside_of_the_folder(store, files, tmp_path, path):
    with pytest.raises(DamagedCopyError, match="outside of its folder"):
        fetch(store, "", tmp_path / "there", [{**files[1][0], "path": path}])


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"format": 1, "step": 3, "files": [{"path": "a"}]}',
                                     json.dumps({"format": 1, "step": 4, "files": []}).encode()])
def test_a_torn_list_of_files_is_a_damaged_copy(store, content):
    store.put(f"step-00000003/{COPY}", content)
    with pytest.raises(DamagedCopyError, match=r"copy\.json is damaged"):
        CopiedCheckpoints(store).read(3)
