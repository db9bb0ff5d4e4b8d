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
from numpy.lib.recfunctions import unstructured_to_structured

from pipeline.data.planning import components, spills
from pipeline.data.planning.components import LABEL, Graph, components_payload, label_components, labels_path
from pipeline.data.planning.near import EDGE, band_name, edges_path
from pipeline.data.planning.runs import group_name, layout
from pipeline.errors import is_full_disk
from tests.data.planning.staged_corpora import firsts


def write_edges(folder, payload, edges, seed=0):
    """Edges (n, 2) in the files of a payload, in any order."""
    names = [group_name(group) for group in range(len(payload["starts"]) - 1)]
    names += [band_name(band, partition) for band in range(payload["bands"])
              for partition in range(payload["partitions"])]
    of = np.random.default_rng(seed).integers(0, len(names), len(edges))
    rows = unstructured_to_structured(np.array(edges, np.int64).reshape(-1, 2), EDGE)
    for number, name in enumerate(names):
        edges_path(folder, name).parent.mkdir(parents=True, exist_ok=True)
        rows[of == number].tofile(edges_path(folder, name))


def payload_of(starts, stretch, keep="first", bands=1, partitions=1):
    return {"starts": starts, "bands": bands, "partitions": partitions, "keep": keep, "edges": "", "stretch": stretch}


@contextmanager
def at_once(rows):
    with mock.patch.object(components, "AT_ONCE", rows), mock.patch.object(spills, "ROWS_AT_ONCE", rows):
        yield


def both(folder, payload, edges, seed=0):
    """Label; what is found must be what union-find finds. The record."""
    write_edges(folder, payload, edges, seed)
    kept, starts = firsts(edges, max if payload["keep"] == "last" else min), np.array(payload["starts"])
    others = np.array([number for number, first in kept.items() if first != number], np.int64)
    groups = np.searchsorted(starts, others, "right") - 1
    rows = np.array([(number - starts[group], kept[number]) for number, group in
                     zip(others.tolist(), groups.tolist(), strict=True)], LABEL)
    ends = np.searchsorted(groups, np.arange(len(starts))).astype("<u8")
    record = label_components(folder, payload)
    assert labels_path(folder).read_bytes() == ends.tobytes() + rows.tobytes()
    assert (record["nodes"], record["components"]) == (len(kept), len(set(kept.values())))
    assert not list(labels_path(folder).parent.glob("components.*"))
    return record


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
@given(graph=graphs(), keep=st.sampled_from(["first", "last"]), stretch=st.sampled_from([1, 2, 3, 10, 64, 1000]),
       rows=st.sampled_from([1, 5, 10**6]), groups=st.integers(1, 5), bands=st.integers(1, 2),
       partitions=st.sampled_from([1, 4]))
def test_labels_are_those_of_union_find(tmp_path_factory, graph, keep, stretch, rows, groups, bands, partitions):
    documents, edges, seed = graph
    starts = np.linspace(0, documents, groups + 1).astype(int).tolist()
    with at_once(rows):
        both(tmp_path_factory.mktemp("graph"), payload_of(starts, stretch, keep, bands, partitions), edges, seed)


def test_memory_follows_from_the_stretch_and_not_from_edges_or_documents(tmp_path):
    def peak(number, documents, edges):
        payload = payload_of([0, documents], 20_000, partitions=2)
        write_edges(tmp_path / str(number), payload,
                    np.sort(np.random.default_rng(1).integers(0, documents, (edges, 2)), axis=1))
        tracemalloc.start()
        label_components(tmp_path / str(number), payload)
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found
    with at_once(5_000):
        small, more_edges, more_documents = peak(0, 200_000, 30_000), peak(1, 200_000, 400_000), peak(
            2, 800_000, 400_000)
    # Small, 0.8 MB; more edges, 1.0; of more documents are more stretches, and so more open files, 1.2. All of it in
    # arrays took 18.
    assert more_edges < 1.5 * small + 2**19 and more_documents < 1.5 * small + 2**20
    assert max(more_edges, more_documents) < 4_500_000


def test_the_stretch_is_of_the_payload_and_bounds_how_many_there_are():
    def stretch(documents):
        return components_payload(layout(["a"], [0], [documents]), 1, "")["stretch"]
    assert stretch(1) == stretch(10**9) == components.STRETCH and 10**9 / components.STRETCH < components.STRETCHES
    assert 10**10 / components.STRETCHES <= stretch(10**10) < 10**10 / components.STRETCHES + 1
    assert 12 * components.STRETCH < 0.5e9 and 12 * stretch(10**10) < 1.2e9  # bytes


def test_what_is_put_aside_goes_when_the_stage_is_stopped_and_what_a_kill_left_at_the_next_start(tmp_path, monkeypatch):
    class Stopped(BaseException):
        pass

    def stopped(graph, stretch):
        left = {path.name.split("-")[0] for path in (tmp_path / "staging").glob("components.*.tmp/*")}
        assert left == {"hung", "asks"}  # of the edges nothing is needed any more
        raise Stopped
    payload, edges = payload_of([0, 100], 10), SHAPES["path"](100)
    write_edges(tmp_path, payload, edges)
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(Graph, "label", stopped)
        label_components(tmp_path, payload)
    assert [path.name for path in (tmp_path / "staging").iterdir()] == ["edges"]
    (tmp_path / "staging/components.node-7.tmp").mkdir()
    (tmp_path / "staging/components.node-7.tmp/hung-3").write_bytes(b"left")
    both(tmp_path, payload, edges)


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path):
    payload, edges = payload_of([0, 50_000], 10**6), SHAPES["path"](50_000)
    write_edges(tmp_path, payload, edges)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"components\..*\.tmp/inside-0") as caught:
            label_components(tmp_path, payload)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert is_full_disk(caught.value)
    assert [path.name for path in (tmp_path / "staging").iterdir()] == ["edges"]
    both(tmp_path, payload, edges)


def test_a_corpus_of_no_documents_or_no_edges_has_no_labels(tmp_path):
    for number, starts in enumerate(([0, 0], [0, 5, 9])):
        assert both(tmp_path / str(number), payload_of(starts, 4), [])["nodes"] == 0
