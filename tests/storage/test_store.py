"""What every store does, on a disk, in memory and at servers of each cloud."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from drover.pipeline.core.errors import UserError
from drover.pipeline.storage.mirror import Owner
from drover.pipeline.storage.store import Changed, Exists, Missing, Store, preflight
from tests.refusal import refused


def test_objects_are_listed_in_the_order_of_their_paths_read_replaced_and_deleted(store, tmp_path):
    preflight(store)
    assert list(store.list()) == [], "a sound store is left as it was"
    paths = ["empty", "b", "a/x", "a-b/y", "a.c", "a/b/c", "ü %20+é.txt", "a/zwei"]
    for number, path in enumerate(paths):
        written = store.put(path, bytes([number]) * number)
        assert (written.path, written.size) == (path, number)
    entries = list(store.list())
    assert [(entry.path, entry.size) for entry in entries] == [(path, paths.index(path)) for path in sorted(paths)]
    assert [entry.path for entry in store.list("a")] == ["a/b/c", "a/x", "a/zwei"]
    assert [entry.path for entry in Store(store.url_of("a")).list()] == ["b/c", "x", "zwei"]
    assert list(store.list("nothing/here")) == []
    for entry in entries:
        data = bytes([entry.size]) * entry.size
        assert store.head(entry.path) == entry and entry.etag and entry.modified > 1e9
        assert store.read(entry.path, etag=entry.etag) == store.stream(entry.path, entry=entry).read() == data
        assert store.fetch(entry.path, tmp_path / "x") == hashlib.sha256(data).hexdigest()
    assert store.head("a/x/nothing") is None and store.head("a") is None
    assert store.put("b", b"56789").size == 5
    store.delete(["b", "nothing", "a/b/c"])
    store.delete([])
    store.delete(["nothing"])
    assert [entry.path for entry in store.list()] == sorted({*paths} - {"b", "a/b/c"})


def test_ranges_are_read_exactly_or_not_at_all(store):
    store.put("data", bytes(range(200)))
    assert store.read("data", 10, 20) == bytes(range(10, 20))
    assert store.read("data", 150) == bytes(range(150, 200)) and store.read("data", 7, 7) == b""
    refused(UserError, "10 bytes from 195 on, got 5", store.read, "data", 195, 205)
    refused(UserError, "data", store.read, "data", 300, 310)
    refused(Missing, "nix", store.read, "nix")
    refused(Changed, "data", store.read, "data", 0, 5, etag='"another"')


def test_large_objects_are_written_in_parts_streamed_and_fetched(store, big, tmp_path):
    file, target, digest = tmp_path / "big", tmp_path / "new" / "copy", hashlib.sha256(big)
    file.write_bytes(big)
    entry = store.put("big", file)
    assert entry.size == len(big) == store.head("big").size
    with store.stream("big", len(big) - 100, entry=entry) as stream:
        assert (stream.read(10), stream.read()) == (big[-100:-90], big[-90:])
    with store.stream("big") as stream:  # not read to its end
        assert stream.read(3) == big[:3]
    with store.stream("big") as stream:
        assert hashlib.sha256(stream.read()).digest() == digest.digest()
    assert store.read("big", 5, len(big) - 5) == big[5:-5]
    assert store.fetch("big", target) == digest.hexdigest()
    assert target.read_bytes() == big and [path.name for path in target.parent.iterdir()] == ["copy"]


def test_what_is_to_be_new_is_written_once_and_what_is_replaced_is_another(store, tmp_path):
    first = store.put("one", b"1", only_new=True)
    refused(Exists, "one", store.put, "one", b"2", only_new=True)
    second = store.put("one", b"22")
    assert store.read("one") == b"22" and store.head("one").etag == second.etag != first.etag
    (tmp_path / "data").write_bytes(b"from a file")
    assert store.put("other", tmp_path / "data", only_new=True).size == 11
    refused(Changed, "one", store.stream("one", entry=first).read)


def test_of_many_who_claim_a_place_at_once_one_has_it(store):
    owners = [Owner(store) for _ in range(6)]

    def claim(owner):
        with suppress(UserError):
            owner.claim(name=str(id(owner)))
            return owner
    with ThreadPoolExecutor(6) as pool:
        [one] = filter(None, pool.map(claim, owners))
    one.refuse_lost()
    assert Owner(store).content["name"] == str(id(one))
