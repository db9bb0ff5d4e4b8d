"""Cyclic garbage is collected after the steps that are said, and by nothing else in between."""

import gc
import weakref

from pipeline.training import garbage


class Node:
    """Something that refers to itself."""

    def __init__(self):
        self.itself = self


def test_garbage_goes_after_the_same_steps_on_all_ranks():
    try:
        garbage.begin()
        node = weakref.ref(Node())
        kept = [[] for _ in range(100_000)]  # so many objects have Python collect
        garbage.collect(garbage.EVERY - 1)
        assert node() is not None and len(kept) == 100_000
        garbage.collect(garbage.EVERY)
        assert node() is None
        held = Node()
        garbage.collect(garbage.EVERY)
        old, held = weakref.ref(held), None
        garbage.collect(garbage.EVERY)
        assert old() is not None and held is None
        garbage.collect(garbage.ALL_EVERY)
        assert old() is None
    finally:
        garbage.end()
    assert gc.isenabled() and gc.get_freeze_count() == 0
