"""The node's cache: verified, within its bound, fetched once, whatever else happens on the disk."""

import errno
import hashlib
import io
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from drover.pipeline.core.errors import UserError
from drover.pipeline.data.stored.figures import Figures
from drover.pipeline.data.stored.node_cache import Closed, NodeCache
from tests.refusal import refused

SIZE = 5000


CONTENT = [bytes([number]) * SIZE for number in range(8)]
"""The files that tests fetch, by number."""
NAMES = [hashlib.sha256(content).hexdigest() for content in CONTENT]


def fail(number):
    raise OSError(number, os.strerror(number))


class Cache(NodeCache):
    """One with room for so many of them, that keeps what it says and what it asks the store for."""

    def __init__(self, folder, things=100.0):
        self.told, self.asked, self.content = [], [], [*CONTENT]
        super().__init__(folder, int(things * SIZE), Figures(), self.told.append)

    def get(self, number, ahead=False, read=None):
        """The content; None where there is no room."""
        def asked(start):
            self.asked.append(number)
            return io.BytesIO(self.content[number][start:])
        found = self.open(f"thing {number}", NAMES[number], SIZE, read or asked, ahead=ahead)
        if found is None:
            return None
        try:
            return os.pread(found, 2 * SIZE, 0)
        finally:
            os.close(found)

    def there(self):
        """Numbers of the things in the folder."""
        return {NAMES.index(path.stem) for path in self.folder.glob("*.arrow")}

    def bytes(self):
        """Of all things in the folder, those that are being fetched with them."""
        return sum(path.stat().st_size for path in self.folder.iterdir() if path.suffix in (".arrow", ".tmp"))


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr("drover.pipeline.data.stored.node_cache.PAUSE_S", 0.0)


NUMBERS = st.integers(0, 5)
STEPS = st.lists(st.one_of(
    st.tuples(st.just("get"), st.booleans(), NUMBERS, st.booleans()),
    st.tuples(st.sampled_from(["remove", "write to"]), NUMBERS)), max_size=30)


@settings(max_examples=120)
@example(steps=[("get", False, 0, False), ("write to", 0), ("remove", 0), ("get", False, 0, False)], room=1,
         recent=False)
@given(steps=STEPS, room=st.integers(1, 4), recent=st.booleans())
def test_the_bound_holds_and_the_longest_unused_goes(tmp_path_factory, monkeypatch, steps, room, recent):
    """Two processes get things, needed or ahead, which removes nothing `recent`; others remove things and write to
    them. The model is a list of what is there, the longest unused first."""
    folder, there, harmed, fetched, removed, again = tmp_path_factory.mktemp("cache"), [], set(), 0, 0, 0
    caches = [Cache(folder, room), Cache(folder, room)]
    monkeypatch.setattr("drover.pipeline.data.stored.node_cache.RECENT_S", 1e6 if recent else -1e6)
    for step in steps:
        if step[0] == "get":
            _, who, number, ahead = step
            again += number in harmed
            there = [one for one in there if one != number or number not in harmed]
            fits = number in there or len(there) < room
            if not fits and not (ahead and recent):
                there.pop(0)
                removed, fits = removed + 1, True
            if fits:
                fetched += number not in there
                there = [*(one for one in there if one != number), number]
            assert caches[who].get(number, ahead=ahead) == (CONTENT[number] if fits else None)
            harmed = (harmed & set(there)) - {number}
        elif step[1] in there:
            path = caches[0].folder / f"{NAMES[step[1]]}.arrow"
            if step[0] == "remove":
                path.unlink()
                there.remove(step[1])
                harmed.discard(step[1])
            else:
                path.chmod(0o600)
                path.write_bytes(bytes(SIZE))
                harmed.add(step[1])
        assert caches[0].there() == set(there) and caches[0].bytes() <= room * SIZE
        assert sum(len(cache.asked) for cache in caches) == sum(cache.figures.fetched for cache in caches) == fetched
        assert sum(cache.figures.removed for cache in caches) == removed
        assert sum("was written to" in told for cache in caches for told in cache.told) == again
    for cache in caches:
        cache.close()


def test_what_was_fetched_is_found_also_by_the_next_process(tmp_path):
    cache = Cache(tmp_path)
    assert cache.folder.stat().st_mode & 0o777 == 0o700 and cache.get(1) == CONTENT[1]
    assert {path.stat().st_mode & 0o777 for path in cache.folder.iterdir()} == {0o600}
    later = Cache(tmp_path, things=1)
    read = later.open("thing 1", NAMES[1], SIZE, pytest.fail)
    assert (cache.figures.fetched, cache.figures.hits, later.figures.hits) == (1, 0, 1)
    assert later.get(3) == CONTENT[3] and later.there() == {3}
    assert os.pread(read, SIZE, 0) == CONTENT[1]  # who reads it reads on
    os.close(read)


@pytest.mark.parametrize(("content", "asked", "told"), [
    (bytes([2]) * SIZE + b"x", 2, "thing 2 is not what .*{} -> "),
    (bytes([2]) * (SIZE - 1), 3, "thing 2 breaks off after 4,999 of 5,000 bytes")])
def test_content_that_is_not_what_the_hash_says_is_refused_by_name_and_not_kept(tmp_path, content, asked, told):
    cache = Cache(tmp_path)
    cache.content[2] = content
    refused(UserError, told.format(NAMES[2][:12]), cache.get, 2)
    assert cache.asked == [2] * asked and cache.figures.retries == asked - 1
    assert not cache.there() and not list(cache.folder.glob("*.tmp"))


def test_what_breaks_off_goes_on_from_there(tmp_path):
    cache, starts, left = Cache(tmp_path), [], [1000, 1000, 0, SIZE]

    def read(start):
        starts.append(start)
        return io.BytesIO(CONTENT[3][start:start + left.pop(0)])
    assert cache.get(3, read=read) == CONTENT[3] and starts == [0, 1000, 2000, 2000]
    assert cache.figures.retries == 3 and len(cache.told) == 3


def test_a_store_that_does_not_answer_ends_in_its_own_words(tmp_path):
    cache = Cache(tmp_path)

    def read(start):
        raise UserError("s3://a/b: read failed.")
    refused(UserError, "s3://a/b: read failed", cache.get, 0, read=read)
    assert cache.get(0) is not None  # its lock is free again


def test_only_what_is_the_caches_own_is_removed(tmp_path):
    own = Cache(tmp_path).folder
    kept = [tmp_path / "weights.arrow", own / "weights.arrow", own / "notes.txt"]
    left = own / f"{NAMES[0]}.node-1.tmp"  # of a process that was killed
    for path in (*kept, left):
        path.write_bytes(bytes(3 * SIZE))
    cache = Cache(tmp_path, things=1)
    assert not left.exists()
    for number in range(4):
        cache.get(number)
    assert all(path.exists() for path in kept)
    assert {path.name for path in own.glob("*.arrow")} == {"weights.arrow", f"{NAMES[3]}.arrow"}


@pytest.mark.parametrize(("number", "asked"), [(0, []), (1, [1])], ids=["itself", "room for another"])
def test_who_needs_what_is_being_fetched_waits_for_it(tmp_path, number, asked):
    cache, begun, go = Cache(tmp_path), threading.Event(), threading.Event()

    def read(start):
        begun.set()
        go.wait()
        return io.BytesIO(bytes(SIZE))
    with ThreadPoolExecutor(5) as pool:
        pool.submit(cache.get, 0, read=read)
        begun.wait()
        other = Cache(tmp_path, things=1.5)
        assert other.get(1, ahead=True) is None and len(list(other.folder.glob("*.tmp"))) == 1  # its size is spoken for
        found = [pool.submit(other.get, number) for _ in range(4)]
        go.set()
    assert [one.result() for one in found] == [CONTENT[number]] * 4
    assert other.asked == asked and other.there() == {number}


def test_a_full_disk_lowers_the_bound_and_says_so(tmp_path, monkeypatch):
    cache, room = Cache(tmp_path), 3 * SIZE
    allocate = os.posix_fallocate

    monkeypatch.setattr("os.posix_fallocate", lambda descriptor, start, size:
                        fail(errno.ENOSPC) if cache.bytes() + size > room else allocate(descriptor, start, size))
    for number in range(6):
        assert cache.get(number) == CONTENT[number]
    assert cache.there() == {3, 4, 5} and cache.limit == room and len(cache.told) == 1
    assert "is full: the cache's bound is 0.000 GB now" in cache.told[0]


@pytest.mark.parametrize(("place", "number"), [("os.posix_fallocate", errno.EDQUOT), ("os.posix_fallocate", errno.EIO),
                                               ("drover.pipeline.data.stored.node_cache.flush", errno.ENOSPC)])
def test_a_disk_without_room_for_one_gives_none(tmp_path, monkeypatch, place, number):
    """At the start, and while it is written. A disk that does not work is an error."""
    cache = Cache(tmp_path)
    monkeypatch.setattr(place, lambda *arguments: fail(number))
    if number == errno.EIO:
        refused(UserError, r"cannot be written to: Input/output error\. Give another train\.cache", cache.get, 0)
    else:
        assert cache.get(0) is None and cache.get(1) is None and "is full" in cache.told[0]
    assert not list(cache.folder.glob("*.tmp")) and bool(cache.asked) == (number == errno.ENOSPC)


@pytest.mark.parametrize("make", [
    lambda own: own.write_text(""), lambda own: own.symlink_to(own.parent),
    lambda own: own.symlink_to("/nowhere/at all")], ids=["file", "link", "absent"])
def test_a_folder_that_cannot_be_used_is_named(tmp_path, make):
    make(tmp_path / f"drover-tokens-{os.getuid()}")
    refused(UserError, r"train\.cache\.folder", Cache, tmp_path)


def test_reading_ends_in_the_middle_when_it_is_closed(tmp_path):
    cache = Cache(tmp_path)

    def read(start):
        cache.close()
        return io.BytesIO(bytes(SIZE))
    with pytest.raises(Closed):
        cache.get(0, read=read)
    assert not list(cache.folder.glob("*.tmp"))
