"""The node's cache: verified, within its bound, fetched once, whatever else happens on the disk."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import threading

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from drover.pipeline.core.errors import UserError
from drover.pipeline.data.stored.figures import Figures
from drover.pipeline.data.stored.node_cache import Closed, NodeCache

SIZE = 5000


class Source:
    """Things to fetch, of SIZE bytes each, and how often each was asked for."""

    def __init__(self, count=8):
        self.content = {hashlib.sha256(data).hexdigest(): data for data in
                        (bytes([number]) * SIZE for number in range(count))}
        self.names, self.asked = list(self.content), []

    def reader(self, number):
        def read(start):
            self.asked.append(number)
            return io.BytesIO(self.content[self.names[number]][start:])
        return read


def together(*functions):
    """Threads that run them; to be joined."""
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    return threads


def fail(number):
    raise OSError(number, os.strerror(number))


class Cache(NodeCache):
    """One with room for so many of them, that keeps what it says."""

    def __init__(self, folder, source, things=100.0):
        self.told, self.source = [], source
        super().__init__(folder, int(things * SIZE), Figures(), self.told.append)

    def get(self, number, ahead=False):
        """The content; None where there is no room."""
        found = self.open(f"thing {number}", self.source.names[number], SIZE, self.source.reader(number), ahead=ahead)
        if found is None:
            return None
        try:
            return os.pread(found, 2 * SIZE, 0)
        finally:
            os.close(found)

    def there(self):
        """Numbers of the things in the folder."""
        return {self.source.names.index(path.stem) for path in self.folder.glob("*.arrow")}

    def bytes(self):
        """Of all things in the folder, those that are being fetched with them."""
        return sum(path.stat().st_size for path in self.folder.iterdir() if path.suffix in (".arrow", ".tmp"))


@pytest.fixture
def source():
    return Source()


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr("drover.pipeline.data.stored.node_cache.PAUSE_S", 0.0)


NUMBERS = st.integers(0, 5)
STEPS = st.lists(st.one_of(
    st.tuples(st.just("get"), st.booleans(), NUMBERS, st.booleans()),
    st.tuples(st.sampled_from(["remove", "write to"]), NUMBERS)), max_size=30)


@settings(max_examples=120, deadline=None)
@example(steps=[("get", False, 0, False), ("write to", 0), ("remove", 0), ("get", False, 0, False)], room=1,
         recent=False)
@given(steps=STEPS, room=st.integers(1, 4), recent=st.booleans())
def test_the_bound_holds_and_the_longest_unused_goes(tmp_path_factory, steps, room, recent):
    """Two processes get things, needed or ahead, which removes nothing `recent`; others remove things and write to
    them. The model is a list of what is there, the longest unused first."""
    source, there, harmed, fetched, removed, again = Source(), [], set(), 0, 0, 0
    caches = [Cache(tmp_path_factory.mktemp("cache"), source, room)]
    caches.append(Cache(caches[0].folder.parent, source, room))
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
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("drover.pipeline.data.stored.node_cache.RECENT_S", 1e6 if recent else -1e6)
                assert caches[who].get(number, ahead=ahead) == (bytes([number]) * SIZE if fits else None)
            harmed = (harmed & set(there)) - {number}
        elif step[1] in there:
            path = caches[0].folder / f"{source.names[step[1]]}.arrow"
            if step[0] == "remove":
                path.unlink()
                there.remove(step[1])
                harmed.discard(step[1])
            else:
                path.chmod(0o600)
                path.write_bytes(bytes(SIZE))
                harmed.add(step[1])
        assert caches[0].there() == set(there) and caches[0].bytes() <= room * SIZE
        assert len(source.asked) == sum(cache.figures.fetched for cache in caches) == fetched
        assert sum(cache.figures.removed for cache in caches) == removed
        assert sum("was written to" in told for cache in caches for told in cache.told) == again
    for cache in caches:
        cache.close()


def test_what_was_fetched_is_found_also_by_the_next_process(tmp_path, source):
    cache = Cache(tmp_path, source)
    read, later = cache.open("thing 1", source.names[1], SIZE, source.reader(1)), Cache(tmp_path, source, things=1)
    assert cache.folder.stat().st_mode & 0o777 == 0o700
    assert cache.get(1) == later.get(1) == bytes([1]) * SIZE
    assert (cache.figures.fetched, cache.figures.hits, later.figures.hits) == (1, 1, 1)
    assert later.get(3) is not None and later.there() == {3}
    assert os.pread(read, SIZE, 0) == bytes([1]) * SIZE  # who reads it reads on
    os.close(read)


@pytest.mark.parametrize(("content", "asked", "told"), [
    (bytes([2]) * SIZE + b"x", 2, "thing 2 is not what .*{} -> "),
    (bytes([2]) * (SIZE - 1), 3, "thing 2 breaks off after 4,999 of 5,000 bytes")])
def test_content_that_is_not_what_the_hash_says_is_refused_by_name_and_not_kept(tmp_path, source, content, asked, told):
    cache = Cache(tmp_path, source)
    source.content[source.names[2]] = content
    with pytest.raises(UserError, match=told.format(source.names[2][:12])):
        cache.get(2)
    assert source.asked == [2] * asked and cache.figures.retries == asked - 1
    assert not cache.there() and not list(cache.folder.glob("*.tmp"))


def test_what_breaks_off_goes_on_from_there(tmp_path, source):
    cache, starts, left = Cache(tmp_path, source), [], [1000, 1000, 0, SIZE]

    def read(start):
        starts.append(start)
        return io.BytesIO(source.content[source.names[3]][start:start + left.pop(0)])
    source.reader = lambda number: read
    assert cache.get(3) == bytes([3]) * SIZE and starts == [0, 1000, 2000, 2000]
    assert cache.figures.retries == 3 and len(cache.told) == 3


def test_a_store_that_does_not_answer_ends_in_its_own_words(tmp_path, source):
    cache = Cache(tmp_path, source)

    def read(start):
        raise UserError("s3://a/b: read failed.")
    with pytest.raises(UserError, match="s3://a/b: read failed"):
        cache.open("thing", source.names[0], SIZE, read)
    assert cache.get(0) is not None  # its lock is free again


def test_only_what_is_the_caches_own_is_removed(tmp_path, source):
    own = Cache(tmp_path, source).folder
    kept = [tmp_path / "weights.arrow", own / "weights.arrow", own / "notes.txt"]
    left = own / f"{source.names[0]}.node-1.tmp"  # of a process that was killed
    for path in (*kept, left):
        path.write_bytes(bytes(3 * SIZE))
    cache = Cache(tmp_path, source, things=1)
    assert not left.exists()
    for number in range(4):
        cache.get(number)
    assert all(path.exists() for path in kept)
    assert {path.name for path in own.glob("*.arrow")} == {"weights.arrow", f"{source.names[3]}.arrow"}


@pytest.mark.parametrize(("number", "asked"), [(0, []), (1, [1])], ids=["itself", "room for another"])
def test_who_needs_what_is_being_fetched_waits_for_it(tmp_path, source, number, asked):
    cache, begun, go, found = Cache(tmp_path, source), threading.Event(), threading.Event(), []

    def read(start):
        begun.set()
        go.wait()
        return io.BytesIO(bytes(SIZE))
    threads = together(lambda: cache.open("thing 0", source.names[0], SIZE, read))
    begun.wait()
    other = Cache(tmp_path, source, things=1.5)
    assert other.get(1, ahead=True) is None and len(list(other.folder.glob("*.tmp"))) == 1  # its size is spoken for
    threads += together(*[lambda: found.append(other.get(number))] * 4)
    go.set()
    for thread in threads:
        thread.join()
    assert found == [bytes([number]) * SIZE] * 4 and source.asked == asked and other.there() == {number}


def test_a_full_disk_lowers_the_bound_and_says_so(tmp_path, source, monkeypatch):
    cache, room = Cache(tmp_path, source), 3 * SIZE
    allocate = os.posix_fallocate

    monkeypatch.setattr("os.posix_fallocate", lambda descriptor, start, size:
                        fail(errno.ENOSPC) if cache.bytes() + size > room else allocate(descriptor, start, size))
    for number in range(6):
        assert cache.get(number) == bytes([number]) * SIZE
    assert cache.there() == {3, 4, 5} and cache.limit == room and len(cache.told) == 1
    assert "is full: the cache's bound is 0.000 GB now" in cache.told[0]


@pytest.mark.parametrize(("place", "number"), [("os.posix_fallocate", errno.EDQUOT), ("os.posix_fallocate", errno.EIO),
                                               ("drover.pipeline.data.stored.node_cache.flush", errno.ENOSPC)])
def test_a_disk_without_room_for_one_gives_none(tmp_path, source, monkeypatch, place, number):
    """At the start, and while it is written. A disk that does not work is an error."""
    cache = Cache(tmp_path, source)
    monkeypatch.setattr(place, lambda *arguments: fail(number))
    if number == errno.EIO:
        with pytest.raises(UserError, match=r"cannot be written to: Input/output error\. Give another train\.cache"):
            cache.get(0)
    else:
        assert cache.get(0) is None and cache.get(1) is None and "is full" in cache.told[0]
    assert not list(cache.folder.glob("*.tmp")) and bool(source.asked) == (number == errno.ENOSPC)


@pytest.mark.parametrize("place", ["file", "link", "absent"])
def test_a_folder_that_cannot_be_used_is_named(tmp_path, source, place):
    if place == "file":
        (tmp_path / "c").write_text("")
    elif place == "link":
        (tmp_path / "c").mkdir()
        (tmp_path / "c" / f"drover-tokens-{os.getuid()}").symlink_to(tmp_path)
    else:
        (tmp_path / "c").symlink_to(tmp_path / "nowhere/at all")
    with pytest.raises(UserError, match=r"train\.cache\.folder"):
        Cache(tmp_path / "c", source)


def test_reading_ends_in_the_middle_when_it_is_closed(tmp_path, source):
    cache = Cache(tmp_path, source)

    def read(start):
        cache.close()
        return io.BytesIO(bytes(SIZE))
    with pytest.raises(Closed):
        cache.open("thing 0", source.names[0], SIZE, read)
    assert not list(cache.folder.glob("*.tmp"))
