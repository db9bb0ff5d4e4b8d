"""Components are those of plain union-find, for any graph and any cut; their parts are cut between components."""

from itertools import groupby, pairwise
from unittest import mock

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from drover.pipeline.data.planning import near_duplicates
from drover.pipeline.data.planning.near_duplicates import followers_path, join_components
from drover.pipeline.data.planning.runs import DIGEST, LINK, Layout, read_rows, write_links
from tests.data.planning.staged_corpora import firsts


def layout_of(starts, last=False, bands=1, partitions=1):
    """Groups of one unit each."""
    groups = len(starts) - 1
    return Layout([f"a-{group:05d}" for group in range(groups)], [0] * groups, [*map(int, starts)],
                  list(range(groups + 1)), partitions, last, bands)


def write_edges(folder, plan, edges, seed=0):
    """Edges (n, 2) in the files of links, in any order."""
    plan.write(folder)
    names = [(column, name) for column in range(DIGEST + 1, plan.bands + 1)
             for name in (*plan.group_names, *plan.partition_names)]
    of = np.random.default_rng(seed).integers(0, len(names), len(edges))
    rows = np.array(edges, np.int64).reshape(-1, 2)
    for number, (column, name) in enumerate(names):
        write_links(folder, plan, column, name, *rows[of == number].T)


def both(folder, plan, edges, seed=0):
    """Join; what is found must be what union-find finds."""
    write_edges(folder, plan, edges, seed)
    kept = firsts(edges, max if plan.last else min)
    join_components(folder, {})
    parts = [read_rows(followers_path(folder), LINK, part, plan.partitions).tolist() for part in range(plan.partitions)]
    rows, sign = [row for part in parts for row in part], -1 if plan.last else 1
    assert rows == sorted(((other, first) for other, first in kept.items() if other != first),
                          key=lambda row: (sign * row[1], sign * row[0]))
    whole = [first for part in parts for first, _ in groupby(part, key=lambda row: row[1])]
    assert len(whole) == len(set(whole)), "a component lies in one part"


@st.composite
def graphs(draw):
    """(documents, edges): a path or none, in any order of the documents, and edges at random."""
    documents = draw(st.integers(2, 120) | st.just(400))
    seed, numbers = draw(st.integers(0, 2**32 - 1)), np.arange(documents)
    shuffled = np.random.default_rng(seed).permutation(documents)
    path = draw(st.sampled_from([numbers[:0], numbers, numbers[::-1], shuffled]))
    edges = draw(st.lists(st.tuples(st.integers(0, documents - 1), st.integers(0, documents - 1)), max_size=120))
    return documents, [*pairwise(path), *(edge for edge in edges if edge[0] != edge[1])], seed


@settings(max_examples=40, deadline=None)
@given(graph=graphs(), last=st.booleans(), rows=st.sampled_from([1, 5, 10**6]), groups=st.integers(1, 5),
       bands=st.integers(1, 2), partitions=st.sampled_from([1, 4]))
def test_components_are_those_of_union_find(tmp_path_factory, graph, last, rows, groups, bands, partitions):
    documents, edges, seed = graph
    with mock.patch.object(near_duplicates, "AT_ONCE", rows):
        plan = layout_of(np.linspace(0, documents, groups + 1), last, bands, partitions)
        both(tmp_path_factory.mktemp("graph"), plan, edges, seed)


def test_a_corpus_of_no_documents_or_no_edges_has_no_followers(tmp_path):
    for number, starts in enumerate(([0, 0], [0, 5, 9])):
        both(tmp_path / str(number), layout_of(starts), [])
