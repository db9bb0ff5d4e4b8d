"""Training in phases on packed documents: one curve on any ranks, killed and continued in every phase; what is told of
it is what came of it; and what of a plan may change."""

from __future__ import annotations

import json
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
    run_with_faults,
    train_and_kill,
    train_folder,
    with_phases,
)
from tools.verify import __main__ as verify
from tools.where import __main__ as where

TRAIN = {"steps": None, "precision": "fp64", "packing": "best_fit", "phases": THREE_PHASES, "sample_every": 6}


@pytest.fixture
def fresh(tmp_path, two_sources) -> Path:
    """Config of a run in packed phases that can train at once."""
    return reusing(two_sources, tmp_path, train=TRAIN)


@pytest.mark.slow
def test_a_run_killed_in_every_phase_goes_on_upon_other_ranks(fresh, capsys):
    said = run_stage("train", fresh, "name=whole").stdout
    assert "  of code the epoch has " in said and said.count("  padding: ") == 3
    for ranks, after, settings in ((1, 2, []), (2, 6, []), (2, 8, ["parallel.pp=2"]), (4, 10, ["parallel.cp=2",
                                                                                         "parallel.tp=2"])):
        train_and_kill(fresh, *settings, ranks=ranks, after_step=after, how=signal.SIGKILL, log="events")
    plans = sorted((train_folder(fresh) / "packing").rglob("*.bins"))
    written = {path: path.stat().st_mtime_ns for path in plans}
    again = run_stage("train", fresh, ranks=2).stdout
    assert "planned the best-fit packing" not in again and written == {path: path.stat().st_mtime_ns for path in plans}
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
    _found_again(fresh, capsys)


def _as_told(config: Path, counts: dict) -> None:
    """What is counted of the phases is what the steps counted; what was planned comes to it within a few sequences."""
    padding = {record["step"]: record["padding_share"] for record in lines(config)}
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


def _found_again(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From a step of the last phase to its documents, and back; and all that lies there is whole."""
    folder = str(train_folder(config).parent)
    capsys.readouterr()
    assert where.main(["--run", folder, "--step", "10", "--json"]) == 0
    piece = json.loads(capsys.readouterr().out)["pieces"][0]
    assert where.main(["--run", folder, "--document", piece["key"], "--json", "--processes", "1"]) == 0
    [document] = json.loads(capsys.readouterr().out)["documents"]
    assert [one["tokens"] for one in document["readings"] if one["sample"] == piece["sample"]] == [piece["tokens"]]
    assert verify.main(["--run", folder, "--processes", "1"]) == 0
    rest = next(path for path in (train_folder(config) / "packing").glob("*-left-*/train/*.bins"))
    content = rest.read_bytes()
    rest.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert verify.main(["--run", folder, "--processes", "1"]) == 1
    assert rest.name in capsys.readouterr().out


def test_what_is_to_come_may_change_and_what_was_may_not(fresh):
    """A longer length than any before may come: there are no grains that it would have to fit."""
    first, second, third = THREE_PHASES
    third = {key: value for key, value in third.items() if key != "sequence_length"}
    run_with_faults(with_phases(fresh, [first, second, third]), "kill:rank=0,step=7",
                    "train.checkpoint.background=false", expect=-9)
    seen = {record["step"]: record for record in curve(fresh) if record["step"] <= 6}
    refused = run_stage("train", with_phases(fresh, [first, {**second, "sequence_length": 128}, third]),
                        expect=2).stderr
    assert "cannot be planned anew" in refused and "train.phases[1].sequence_length: 64 -> 128" in refused
    changed = [first, {**second, "until": "16k"}, {"until": 20480, "sequence_length": 128, "batch_tokens": 2048,
                                                   "mixture": {"code": 0, "more": 1}, "lr": 0.001}]
    said = run_stage("train", with_phases(fresh, changed)).stdout
    assert "plan changed: train.phases[1].until: 12.29k -> 16k" in said
    assert "plan changed: train.phases[2].sequence_length: 64 -> 128" in said
    assert proven(fresh) and [record["phase"] for record in lines(fresh) if record["step"] > 6] == [2] * 4 + [3] * 2
    assert {record["step"]: record for record in curve(fresh) if record["step"] <= 6} == seen
    run_stage("train", fresh, "name=whole")  # along other learning rates, on the same sequences
    assert [(record["samples"], record["targets"]) for record in curve(fresh)] == [
        (record["samples"], record["targets"]) for record in curve(fresh, "whole")]


@pytest.mark.slow
def test_a_rollback_has_what_is_left_planned_again(fresh):
    """In a phase before the length changes: what the epoch has left then is less."""
    settings = ["train.guards.spike=rollback", "train.guards.spike_min_history=2", "train.checkpoint.background=false"]
    run_stage("train", fresh, "name=whole", *settings)
    run_with_faults(fresh, "spike:rank=0,step=8,factor=600", *settings, ranks=2)
    counts, whole = (read_manifest(train_folder(fresh, name)).counts for name in ("mini", "whole"))
    [event] = events(fresh, "rollback")
    assert event["step"] == 8 and proven(fresh) and proven(fresh, "whole")
    assert [sum(phase["left_out"].values()) > 0 for phase in counts["phases"]] == [False, True, False]
    assert counts["phases"][0] == whole["phases"][0] and counts["plan_sha256"] == whole["plan_sha256"]
    names = [{path.name for path in (train_folder(fresh, name) / "packing").iterdir()} for name in ("mini", "whole")]
    assert names[1] < names[0] and len(names[0] - names[1]) == 1, "what is left after the second phase"
