"""Lines that many documents share are removed, by exact counts over all units and partitions."""

import random
from collections import Counter

import pytest

from drover.pipeline.data.planning import frequent_lines
from tests.data.source_files import write_jsonl
from tests.data.test_counts import report
from tests.stages.test_shard import documents, files_source, finished, folder_of, hashes, run, write_config


@pytest.fixture
def pages(tmp_path):
    """A config of pages from two sources in many small units, of menus, own lines and rare ones; the texts by source.
    Runs and partitions are of few lines."""
    rng = random.Random(1)
    texts = {source: [[f"{rng.choice(['', ' '])}menu {rng.randint(0, 40)}", "menu 1", f"own {source} {page}", "",
                       "\u3000", f"rare {page // 3}\t"] if page % 10 else [" menu 1", "", "menu 2", "menu 2"]
                      for page in range(120)] for source in ("web", "news", "books")}
    for source, own in texts.items():
        for part in range(4):
            write_jsonl(tmp_path / source / f"{part}.jsonl", ({"text": "\n".join(lines)} for lines in own[part::4]))
    sources = [files_source(source, tmp_path / source / "*") for source in texts]
    return write_config(tmp_path, sources, shard_mb=0.001, validation_share=0.1), texts


@pytest.mark.parametrize("most", [3, 5])
def test_lines_in_more_documents_are_removed_from_all_and_counted(pages, monkeypatch, most):
    monkeypatch.setattr(frequent_lines, "ROWS", 50)
    config, texts = pages
    own = f"shard.filters=[{{kind: duplicate_lines, max_documents: {most}, sources: [web, news]}}]"
    counts = finished(config, own).counts
    seen = Counter(line for source in ("web", "news") for lines in texts[source] for line in {*map(str.strip, lines)})
    stay = {source: ["\n".join(line for line in lines if source == "books" or not line.strip()
                               or seen[line.strip()] <= most) for lines in own] for source, own in texts.items()}
    left = {text for own in stay.values() for text in own if text.strip()}
    kept = [document.text for split in ("train", "validation") for document in documents(config, split)]
    assert sorted(kept) == sorted(left) and ("menu 1" in {*map(str.strip, "\n".join(kept).split("\n"))})
    for source in ("web", "news"):
        assert counts["sources"][source]["dropped"]["duplicate_lines"] == sum(not text.strip() for text in stay[source])
        removed = {"lines": sum(seen[line.strip()] > most for lines in texts[source] for line in lines if line.strip()),
                   "bytes": sum(len("\n".join(lines).encode()) - len(text.encode())
                                for lines, text in zip(texts[source], stay[source], strict=True))}
        assert counts["cards"][source]["removed"] == {"duplicate_lines": removed}
    assert f"| news | duplicate_lines | {removed['lines']:,} |" in report(config.parent, counts)
    if most == 3:
        monkeypatch.undo()
        assert run(config, own, "launch.processes=3", "name=three") == 0
        assert hashes(folder_of(config, "three")) == hashes(folder_of(config))


def test_each_filter_counts_what_the_ones_before_it_leave(pages):
    """The second of two filters sees no line that the first removed, and may have sources of its own."""
    config, _ = pages
    counts = finished(config, "shard.filters=[{kind: duplicate_lines, max_documents: 30}, {kind: length, max_words: 9},"
                              " {kind: duplicate_lines, name: rare, max_documents: 1, sources: [books]}]").counts
    removed = {source: card["removed"] for source, card in counts["cards"].items()}
    assert removed["web"]["duplicate_lines"]["lines"] >= 120 and removed["web"]["rare"]["lines"] == 0
    lines = [line for document in documents(config, "train") if document.source == "books"
             for line in map(str.strip, document.text.split("\n")) if line]
    assert max(Counter(lines).values()) == 1 and not any(line.startswith("menu 1 ") for line in lines)
