"""Components are those of plain union-find, for any graph and any cut; their parts are cut between components."""

from itertools import pairwise

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from drover.pipeline.data.planning import near_duplicates
from drover.pipeline.data.planning.near_duplicates import followers_path, join_components
from drover.pipeline.data.planning.runs import DIGEST, LINK, CorpusLayout, read_rows, write_links
from tests.data.planning.staged_corpora import firsts


def write_edges(folder, plan, edges, seed):
    """Edges (n, 2) in the files of links, in any order."""
    plan.write(folder)
    names = [(column, name) for column in range(DIGEST + 1, plan.bands + 1)
             for name in (*plan.group_names, *plan.partition_names)]
    of = np.random.default_rng(seed).integers(0, len(names), len(edges))
    rows = np.array(edges, np.int64).reshape(-1, 2)
    for number, (column, name) in enumerate(names):
        write_links(folder, plan, column, name, *rows[of == number].T)


@st.composite
def graphs(draw):
    """(documents, edges): a path or none, in any order of the documents, and edges at random."""
    documents = draw(st.integers(2, 120) | st.just(400))
    seed, numbers = draw(st.integers(0, 2**32 - 1)), np.arange(documents)
    shuffled = np.random.default_rng(seed).permutation(documents)
    path = draw(st.sampled_from([numbers[:0], numbers, numbers[::-1], shuffled]))
    edges = draw(st.lists(st.tuples(st.integers(0, documents - 1), st.integers(0, documents - 1)), max_size=120))
    return documents, [*pairwise(path), *(edge for edge in edges if edge[0] != edge[1])], seed


@settings(max_examples=40)
@given(graph=graphs(), last=st.booleans(), rows=st.sampled_from([1, 5, 10**6]), groups=st.integers(1, 5),
       bands=st.integers(1, 2), partitions=st.sampled_from([1, 4]))
@example(graph=(0, [], 0), last=False, rows=5, groups=1, bands=1, partitions=1)
def test_components_are_those_of_union_find(tmp_path_factory, monkeypatch, graph, last, rows, groups, bands,
                                            partitions):
    """The plan has groups of one unit each."""
    folder, (documents, edges, seed) = tmp_path_factory.mktemp("graph"), graph
    starts = np.linspace(0, documents, groups + 1).astype(int).tolist()
    plan = CorpusLayout([f"a-{group:05d}" for group in range(groups)], [0] * groups, starts, list(range(groups + 1)),
                  partitions, last, bands)
    write_edges(folder, plan, edges, seed)
    monkeypatch.setattr(near_duplicates, "AT_ONCE", rows)
    join_components(folder, {})
    parts = [read_rows(followers_path(folder), LINK, part, partitions).tolist() for part in range(partitions)]
    followers = [row for row in firsts(edges, max if last else min).items() if row[0] != row[1]]
    assert [row for part in parts for row in part] == sorted(followers, key=lambda row: row[::-1], reverse=last)
    full = [first for part in parts for first in {first for _, first in part}]
    assert len(full) == len(set(full)), "a component lies in one part"
