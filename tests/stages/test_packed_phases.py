"""Training in phases on packed documents: one curve on any ranks, killed and continued in every phase; what is told of
it is what came of it; and what of a plan may change."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from pipeline.contract.manifest import read_manifest
from pipeline.contract.run import run_in
from pipeline.reporting.consumption import consumption_tables
from pipeline.reporting.course import training_section
from pipeline.reporting.facts import Facts
from tests.conftest import run_stage
from tests.stages.training import (
    THREE_PHASES,
    curve,
    difference,
    events,
    lines,
    proven,
    reusing,
    train_and_kill,
    train_folder,
)
from tools.verify import __main__ as verify

TRAIN = {"steps": None, "precision": "fp64", "packing": "best_fit", "phases": THREE_PHASES, "sample_every": 6}


@pytest.fixture
def fresh(tmp_path, two_sources) -> Path:
    """Config of a run in packed phases that can train at once."""
    return reusing(two_sources, tmp_path, train=TRAIN)


@pytest.mark.slow
def test_a_run_killed_in_every_phase_goes_on_upon_other_ranks(fresh, capsys):
    """A plan that is damaged meanwhile is made again, no other is."""
    said = run_stage("train", fresh, "name=whole").stdout
    assert "  of code the epoch has " in said and said.count("  padding: ") == 3
    assert "they were not planned before" in said and "best-fit packing: " in said
    for ranks, after, settings in ((1, 2, []), (2, 6, []), (2, 8, ["parallel.pp=2"]), (4, 10, ["parallel.cp=2",
                                                                                         "parallel.tp=2"])):
        train_and_kill(fresh, *settings, ranks=ranks, after_step=after, how=signal.SIGKILL, log="events")
    plans = {path: path.stat().st_mtime_ns for path in (train_folder(fresh) / "packing").rglob("*.bins")}
    damaged = next(path for path in plans if path.parents[1].name == "128")
    damaged.write_bytes(damaged.read_bytes()[:-8])
    assert "planned the best-fit packing of 1 of " in run_stage("train", fresh, ranks=2).stdout
    assert {path for path, time in plans.items() if path.stat().st_mtime_ns != time} == {damaged}
    assert proven(fresh) and proven(fresh, "whole")
    whole = {record["step"]: record for record in curve(fresh, "whole")}
    assert sorted(whole) == list(range(1, 13)) and {record["step"] for record in lines(fresh)} == set(whole)
    assert difference(lines(fresh), whole) < 1e-12
    for record in lines(fresh):
        assert all(record[key] == whole[record["step"]][key] for key in ("samples", "targets", "lr"))
    counts, whole_counts = (read_manifest(train_folder(fresh, name)).counts for name in ("mini", "whole"))
    for key in ("phases", "plan_sha256", "packing", "planned", "tokens"):
        assert counts[key] == whole_counts[key]
    folders = [{path.relative_to(train_folder(fresh, name)): path.read_bytes() for path in
                (train_folder(fresh, name) / "packing").rglob("*.bins")} for name in ("mini", "whole")]
    assert folders[0] == folders[1] and set(counts["packing"]) - {"kind"} == {
        path.name for path in (train_folder(fresh) / "packing").iterdir()}
    _as_told(fresh, counts)
    rest = next(path for path in (train_folder(fresh) / "packing").glob("*-left-*/train/*.bins"))
    content = rest.read_bytes()
    rest.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert verify.main(["--run", str(train_folder(fresh).parent), "--processes", "1"]) == 1
    told = capsys.readouterr().out
    assert rest.name in told and damaged.name not in told.replace(rest.name, "")


def _as_told(config: Path, counts: dict) -> None:
    """What is counted of the phases is what the steps counted; what was planned comes to it within a few sequences."""
    padding = {record["step"]: record["padding_share"] for record in lines(config)}
    assert all(0 <= share < 0.3 for share in padding.values()) and any(padding.values())
    [start] = events(config, "start")
    assert start["packing"] == counts["packing"]
    assert all(0 < plan["padding_share"] < 0.3 and 0 < plan["documents_cut"] < plan["documents"]
               for plan in counts["packing"].values() if isinstance(plan, dict))
    for number, (phase, size) in enumerate(zip(counts["phases"], (1024, 2048, 2048), strict=True)):
        learned = sum(size * (1 - padding[step]) for step in range(4 * number + 1, 4 * number + 5))
        assert phase["learned"] == pytest.approx(learned, abs=0.5)
        assert sum(phase["tokens"].values()) == pytest.approx(learned, rel=0.05)
        assert phase["tokens"] == counts["planned"]["tokens"][number], "nothing was left out"
    assert sum(phase["learned"] for phase in counts["phases"]) == counts["tokens"] < 20480
    run = run_in(train_folder(config).parent)
    facts = Facts(run.config, "", {name: run.finished(name) for name in ("encode", "train")},
                  events=events(config, "start") + events(config, "resume"))
    [table] = consumption_tables(facts)
    section = training_section(facts)
    told = {row[0]: row[1] for one in section.tables for row in one.rows if len(row) == 2}
    assert told["packing 64"].startswith("sequences ") and "planned" not in told
    sums = [row for row in table.rows if row[1] == "all, without padding"]
    assert [row[4] for row in sums] == [f"{phase['learned']:,}" for phase in counts["phases"]]
