"""The end of each source as its held-out split (`heldout_rule: tail`), exact to the character."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np

from pipeline.data.documents import Document, from_json, to_json
from pipeline.data.planning.decisions import DECISION, SUMS, TRAIN, Summary, decisions_path, large, sums
from pipeline.data.planning.origins import PLACES, read_places, write_places
from pipeline.data.planning.runs import (
    RUN,
    Layout,
    digests,
    group_name,
    read_partition,
    run_path,
)
from pipeline.data.planning.shards import CUT, Pieces
from pipeline.data.reading import INDEX, index_row, staged
from pipeline.data.text_shards import SPLITS
from pipeline.files import atomic_file, output_record

_CHARACTERS = SUMS.index("characters")


@dataclass(frozen=True)
class Border:
    """Where a source's held-out split begins: in document `row` of `unit`, after so many of its characters.

    number: of that document; 0 characters: the border falls before it.
    """

    source: int
    unit: int
    row: int
    number: int
    characters: int


@dataclass(frozen=True)
class Cuts:
    """The documents that a border cuts in two; their parts are staged as one more unit, two rows each.

    Attributes:
        sources: number of the source of each.
        hashes: of the staged parts and of their decisions; empty if nothing is cut.
        changed_copies: (high, low, from, to, change): documents with these digests and numbers have so many more or
            fewer equal ones before them than before the cutting.
    """

    sources: list[int]
    hashes: list[str]
    changed_copies: list[list[int]]


def find_borders(folder: Path, layout: Layout, summary: Summary, heldout_share: float) -> list[Border]:
    """The border of each source that keeps a document.

    Of a source's n characters that are kept, the first int(n * (1 - share)) stay in the training split.
    """
    trained = 1 - Fraction(str(heldout_share))  # as it was written: in floats, 1 - 0.9 is less than 0.1
    found = []
    for source in np.unique(layout.sources):
        units = np.flatnonzero(layout.sources == source)
        ends = np.cumsum(summary.sums[units, TRAIN, _CHARACTERS])
        if not ends[-1]:
            continue
        border = int(int(ends[-1]) * trained)
        place = int(np.searchsorted(ends, border, side="right"))
        unit = int(units[place])
        rows = np.flatnonzero(_decided(folder, layout, unit)["fate"] == TRAIN)
        index = np.load(staged(folder, layout.names[unit], ".npy"), mmap_mode="r")
        before = int(ends[place - 1]) if place else 0
        inside = before + np.cumsum(index["characters"][rows]).astype(np.int64)
        first = int(np.searchsorted(inside, border, side="right"))
        before = int(inside[first - 1]) if first else before
        found.append(Border(int(source), unit, int(rows[first]), int(layout.starts[unit] + rows[first]),
                            border - before))
    return found


def _decided(folder: Path, layout: Layout, unit: int) -> np.ndarray:
    group = int(np.searchsorted(layout.groups, unit, "right")) - 1
    offset = int(layout.starts[unit] - layout.starts[layout.groups[group]])
    count = int(layout.starts[unit + 1] - layout.starts[unit])
    return np.array(np.load(decisions_path(folder, group_name(group)), mmap_mode="r")[offset:offset + count])


def cut(folder: Path, layout: Layout, borders: list[Border]) -> Cuts:
    """Stage both parts of each document that a border cuts."""
    inside = [border for border in borders if border.characters]
    if not inside:
        return Cuts([], [], [])
    path, rows, wholes, offset = staged(folder, CUT, ".documents"), bytearray(), [], 0
    places: list[str] = []
    with atomic_file(path, keep_equal=True) as out:  # every element of the array does so
        for border in inside:
            name = layout.names[border.unit]
            place = np.load(staged(folder, name, ".npy"), mmap_mode="r")[border.row]
            wholes.append((int(place["high"]), int(place["low"])))
            with open(staged(folder, name, ".documents"), "rb") as documents:
                documents.seek(int(place["offset"]))
                whole = from_json(documents.read(int(place["length"])), "")
            at, [origin] = border.characters, read_places(staged(folder, name, PLACES), np.array([border.row]))
            for text, part in ((whole.text[:at], f"[:{at}]"), (whole.text[at:], f"[{at}:]")):
                member = to_json(Document(text, whole.source, whole.id + part, whole.meta))
                places.append(origin and origin + part)
                rows += index_row(text, offset, len(member))
                offset += out.write(member)
    write_places(staged(folder, CUT, PLACES), places)
    index = np.frombuffer(rows, INDEX)
    with atomic_file(staged(folder, CUT, ".npy"), keep_equal=True) as file:
        np.save(file, index)
    copies, changed = _copies(folder, layout, inside, wholes, index)
    decisions = np.zeros(len(index), DECISION)
    decisions["copy"] = copies
    with atomic_file(decisions_path(folder, CUT), keep_equal=True) as file:
        np.save(file, decisions)
    hashes = [str(output_record(folder, made)["sha256"]) for made in (path, decisions_path(folder, CUT))]
    return Cuts([border.source for border in inside], hashes, changed)


def _copies(folder: Path, layout: Layout, borders: list[Border], wholes: list[tuple[int, int]],
            index: np.ndarray) -> tuple[list[int], list[list[int]]]:
    """How many equal documents are before each part, the parts in the places of what is cut; and for which documents
    that changes the number (see `Cuts`)."""
    parts = [(int(row["high"]), int(row["low"])) for row in index]
    # At a document's place: the whole goes, two parts come.
    events = [(border.number, text, change) for border, whole, halves in
              zip(borders, wholes, zip(parts[::2], parts[1::2], strict=True), strict=True)
              for text, change in ((whole, -1), *((half, 1) for half in halves))]
    end, backwards = int(layout.starts[-1]), layout.keep == "last"
    copies = []
    for number, text in enumerate(parts):
        at = borders[number // 2].number
        other = number % 2 == (0 if backwards else 1) and parts[number] == parts[number ^ 1]
        copies.append(_equal_before(folder, layout, text, at) + other
                      + sum(change for place, own, change in events
                            if own == text and (place > at if backwards else place < at)))
    held = {text: _equal_before(folder, layout, text, -1 if backwards else end) for _, text, _ in events}
    for text in wholes:
        held[text] -= 1
    return copies, [[*text, *((0, place) if backwards else (place + 1, end)), change]
                    for place, text, change in events if held[text]]


def _equal_before(folder: Path, layout: Layout, text: tuple[int, int], number: int) -> int:
    """How many documents have this digest and a smaller number; with `keep: last`, a larger one."""
    backwards, starts = layout.keep == "last", layout.group_starts
    partition = text[0] // (2**64 // layout.partitions)
    count = 0
    for group in range(len(starts) - 1):
        inside = starts[group] <= number < starts[group + 1]
        if inside:
            units = layout.units(group)
            high, low = digests(folder, [layout.names[unit] for unit in units],
                                [int(layout.starts[unit + 1] - layout.starts[unit]) for unit in units])
            own = slice(number - starts[group] + 1, None) if backwards else slice(0, number - starts[group])
            count += int(((high[own] == text[0]) & (low[own] == text[1])).sum())
        elif (starts[group] > number) == backwards:
            rows = read_partition(run_path(folder, group), RUN, partition, layout.partitions)
            count += int(rows["count"][(rows["high"] == text[0]) & (rows["low"] == text[1])].sum())
    return count


def pieces_by_tail(folder: Path, layout: Layout, summary: Summary, borders: list[Border], sources: int,
                   target: float) -> list[list[Pieces]]:
    """What makes each split, in the places of documents; for each split and source."""
    of_source, cuts = {border.source: border for border in borders}, 0
    found: list[list[Pieces]] = [[], []]
    for source in range(sources):
        border = of_source.get(source)
        units = np.flatnonzero(layout.sources == source) if border else np.empty(0, np.int64)
        for split in range(len(SPLITS)):
            stretches: list[tuple[int, int, int]] = []
            if border is not None:
                ends = {int(unit): int(layout.starts[unit + 1] - layout.starts[unit]) for unit in units}
                part = [(len(layout.names), 2 * cuts + split, 2 * cuts + split + 1)] if border.characters else []
                after = border.row + bool(border.characters)
                stretches = ([*((unit, 0, end) for unit, end in ends.items() if unit < border.unit),
                              (border.unit, 0, border.row), *part] if SPLITS[split] == "train" else
                             [*part, (border.unit, after, ends[border.unit]),
                              *((unit, 0, end) for unit, end in ends.items() if unit > border.unit)])
            found[split].append(_pieces(folder, layout, summary, stretches, target))
        cuts += border is not None and border.characters > 0
    return found


def _pieces(folder: Path, layout: Layout, summary: Summary, stretches: list[tuple[int, int, int]],
            target: float) -> Pieces:
    whole_units = {unit: place for place, (unit, first, end) in enumerate(stretches) if unit < len(layout.names)
                   and first == 0 and end == layout.starts[unit + 1] - layout.starts[unit]}
    own = np.zeros((len(stretches), len(SUMS)), np.int64)
    places = [(whole_units[unit], before, size) for unit, _, before, size in summary.large if unit in whole_units]
    own[list(whole_units.values())] = summary.sums[list(whole_units), TRAIN]
    for place, (unit, first, end) in enumerate(stretches):
        if unit in whole_units:
            continue
        name = layout.names[unit] if unit < len(layout.names) else CUT
        rows = np.load(staged(folder, name, ".npy"))[first:end]
        if name != CUT:
            rows = rows[_decided(folder, layout, unit)["fate"][first:end] == TRAIN]
        own[place] = sums(rows)
        places += [(place, before, size) for before, size in large(rows["text_bytes"], target)]
    units = np.array([unit for unit, _, _ in stretches], np.int64)
    rows = np.array([[first, end] for _, first, end in stretches], np.int64).reshape(-1, 2)
    return Pieces(units, rows, TRAIN, own, places)
