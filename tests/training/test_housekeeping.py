"""Cyclic garbage is collected after the steps that are said, and by nothing else in between."""

import gc
import weakref
from types import SimpleNamespace

from drover.pipeline.training.housekeeping import ALL_EVERY, EVERY, Garbage


class Node:
    """Something that refers to itself."""

    def __init__(self):
        self.itself = self


def test_garbage_goes_after_the_same_steps_on_all_ranks():
    garbage = Garbage()

    def after(step):
        garbage.after_step(SimpleNamespace(progress=SimpleNamespace(step=step)))
    try:
        garbage.on_start(None)
        node = weakref.ref(Node())
        kept = [[] for _ in range(100_000)]  # so many objects have Python collect
        after(EVERY - 1)
        assert node() is not None and len(kept) == 100_000
        after(EVERY)
        assert node() is None
        held = Node()
        after(EVERY)
        old = weakref.ref(held)
        held = None
        after(EVERY)
        assert old() is not None and held is None
        after(ALL_EVERY)
        assert old() is None
    finally:
        garbage.on_end(None)
    assert gc.isenabled() and gc.get_freeze_count() == 0
