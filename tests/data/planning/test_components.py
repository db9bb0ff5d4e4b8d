"""Components found a stretch of documents at a time: those of union-find in memory, byte for byte, for any graph and
any cut; in memory that follows from the stretch alone; what is put aside on the disk goes, however it ends."""

import resource
import tracemalloc
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drover.pipeline.data.planning import components
from drover.pipeline.data.planning.components import label_components, labels_path, read_labels
from drover.pipeline.data.planning.layout import Layout
from drover.pipeline.data.planning.runs import DIGEST, link_paths, write_links
from drover.pipeline.errors import is_full_disk
from tests.data.planning.staged_corpora import firsts


def layout_of(starts, last=False, bands=1, partitions=1):
    """Groups of one unit each."""
    groups = len(starts) - 1
    return Layout([f"a-{group:05d}" for group in range(groups)], [0] * groups, [*map(int, starts)],
                  list(range(groups + 1)), partitions, last, bands)


def write_edges(folder, plan, edges, seed=0):
    """Edges (n, 2) in the files of links, in any order."""
    plan.write(folder)
    names = [(column, path.name) for column in range(DIGEST + 1, plan.bands + 1)
             for path in link_paths(folder, plan, column, range(len(plan.groups) - 1))]
    of = np.random.default_rng(seed).integers(0, len(names), len(edges))
    rows = np.array(edges, np.int64).reshape(-1, 2)
    for number, (column, name) in enumerate(names):
        write_links(folder, plan, column, name, *rows[of == number].T)


@contextmanager
def at_once(rows, stretch=components.STRETCH):
    with mock.patch.object(components, "AT_ONCE", rows), mock.patch.object(components, "STRETCH", stretch), \
            mock.patch.object(components, "STRETCHES", 10**6):
        yield


def both(folder, plan, edges, seed=0):
    """Label; what is found must be what union-find finds."""
    write_edges(folder, plan, edges, seed)
    kept = firsts(edges, max if plan.last else min)
    label_components(folder, {})
    found = [read_labels(folder, plan, group) for group in range(len(plan.groups) - 1)]
    assert np.concatenate(found).tolist() == [kept.get(number, number) for number in range(plan.starts[-1])]
    assert [len(labels) for labels in found] == np.diff(plan.starts).tolist()
    assert not list(labels_path(folder).parent.glob("components.*"))


SHAPES = {
    "path": lambda nodes: [(node, node + 1) for node in range(nodes - 1)],
    "star": lambda nodes: [(0, node) for node in range(1, nodes)],
    "grid": lambda nodes: [(node, node + step) for node in range(nodes) for step in (1, 9)
                           if node + step < nodes and (step > 1 or (node + 1) % 9)]}


@st.composite
def graphs(draw):
    """(documents, edges): some of the shapes above and edges at random, documents in any order."""
    documents = draw(st.integers(2, 120) | st.just(400))
    seed = draw(st.integers(0, 2**32 - 1))
    edges = [edge for name in draw(st.lists(st.sampled_from(sorted(SHAPES)), max_size=2))
             for edge in SHAPES[name](draw(st.integers(2, documents)))]
    numbers = np.arange(documents)
    order = draw(st.sampled_from([numbers, numbers[::-1], np.random.default_rng(seed).permutation(documents)]))
    edges = [(order[one], order[other]) for one, other in edges]
    edges += draw(st.lists(st.tuples(st.integers(0, documents - 1), st.integers(0, documents - 1)), max_size=120))
    return documents, [edge for edge in edges if edge[0] != edge[1]], seed


@settings(max_examples=40, deadline=None)
@given(graph=graphs(), last=st.booleans(), stretch=st.sampled_from([1, 2, 3, 10, 64, 1000]),
       rows=st.sampled_from([1, 5, 10**6]), groups=st.integers(1, 5), bands=st.integers(1, 2),
       partitions=st.sampled_from([1, 4]))
def test_labels_are_those_of_union_find(tmp_path_factory, graph, last, stretch, rows, groups, bands, partitions):
    documents, edges, seed = graph
    with at_once(rows, stretch):
        plan = layout_of(np.linspace(0, documents, groups + 1), last, bands, partitions)
        both(tmp_path_factory.mktemp("graph"), plan, edges, seed)


def test_memory_follows_from_the_stretch_and_not_from_edges_or_documents(tmp_path):
    def peak(number, documents, edges):
        write_edges(tmp_path / str(number), layout_of([0, documents], partitions=2),
                    np.sort(np.random.default_rng(1).integers(0, documents, (edges, 2)), axis=1))
        tracemalloc.start()
        label_components(tmp_path / str(number), {})
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found
    with at_once(5_000, 20_000):
        small, more_edges, more_documents = peak(0, 200_000, 30_000), peak(1, 200_000, 400_000), peak(
            2, 800_000, 400_000)
    assert more_edges < 1.5 * small + 2**19 and more_documents < 1.5 * small + 2**20
    assert max(more_edges, more_documents) < 4_500_000


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path):
    plan, edges = layout_of([0, 50_000]), SHAPES["path"](50_000)
    write_edges(tmp_path, plan, edges)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"components\..*\.tmp/0") as caught:
            label_components(tmp_path, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert is_full_disk(caught.value)
    assert sorted(path.name for path in (tmp_path / "staging").iterdir()) == ["layout.json", "links"]
    both(tmp_path, plan, edges)


def test_a_corpus_of_no_documents_or_no_edges_has_labels_of_its_own(tmp_path):
    for number, starts in enumerate(([0, 0], [0, 5, 9])):
        both(tmp_path / str(number), layout_of(starts), [])
