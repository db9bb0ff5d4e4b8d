"""What decides about a soak, and what it does all along; tests/slurm/test_soak.py makes a short one."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from tests.tools.chaos_line import chaos
from tools.chaos import __main__ as soak
from tools.chaos.faults import FAULTS, Missed, order
from tools.chaos.run import SoakRun
from tools.slurm_lab import Lab

SEED = 41


def test_every_fault_comes_once_before_any_comes_again_and_a_seed_repeats_the_order() -> None:
    found = order(SEED, 2 * len(FAULTS))
    assert sorted(found[:len(FAULTS)]) == sorted(found[len(FAULTS):]) == sorted(FAULTS)
    assert found == order(SEED, 100)[:len(found)]
    assert found != order(SEED + 1, len(found))


def test_a_soak_needs_a_lab_that_is_up(tmp_path: Path) -> None:
    answer = chaos("--lab", str(tmp_path / "nothing"), "--folder", str(tmp_path / "soak"))
    assert answer.returncode == 2 and "tools.slurm_lab up 4" in answer.stderr and "Traceback" not in answer.stderr


def trained(folder: Path, name: str, steps: int = 3, **last: float) -> None:
    """The log of a training, whose last step may differ."""
    path = folder / "runs" / name / "train/metrics.jsonl"
    path.parent.mkdir(parents=True)
    lines = [{"step": step, "loss": 5.0 - step, "grad_norm": 1.0} for step in range(1, steps + 1)]
    path.write_text("".join(json.dumps({**line, **(last if line is lines[-1] else {})}) + "\n" for line in lines))


@pytest.mark.parametrize(("other", "audited", "report", "problems"), [
    ({}, [], "goodput", []),
    ({"loss": 2.0000001}, [], "goodput", ["step 3 differs from the undisturbed one by 5.0e-08 (bound 1e-09)"]),
    ({"loss": float("nan")}, [], "goodput", ["step 3 differs from the undisturbed one by inf (bound 1e-09)"]),
    ({"steps": 2}, [], "goodput", ["3 steps were logged, 2 undisturbed"]),
    ({}, ["step 2 has no line"], "goodput", ["step 2 has no line"]),
    ({}, [], "words", ["the report does not state the goodput"])])
def test_the_verdict(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, other: dict[str, Any], audited: list[str],
                     report: str, problems: list[str]) -> None:
    trained(tmp_path, "undisturbed", **other)
    trained(tmp_path, "soak")
    (tmp_path / "runs/soak/report.html").write_text(report)
    spent = SimpleNamespace(share=0.5, wall_s=60.0, lost={"restarts": 30.0})
    monkeypatch.setattr(soak, "audit", lambda run: SimpleNamespace(faults=audited, lines=lambda: ["all proven"]))
    monkeypatch.setattr(soak, "goodput", lambda run: spent)
    found = soak.judge(SoakRun(tmp_path, Lab(tmp_path / "lab"), 4), Counter({"warn": 2}), 60.0)
    assert list(found.problems) == problems
    said = "\n".join(found.lines)
    assert "2: warn 2" in said and "samples      all proven" in said and "50.0%" in said


def test_faults_come_in_their_order_until_training_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []

    class Training:
        """One that has another checkpoint whenever it is looked at, and is done after four faults."""

        logged: list[tuple[str, str]] = []

        def wait_for_steps(self) -> bool:
            return len(self.logged) < 4

        def saved(self) -> list[object]:
            return [object()]

        def manifest(self, stage: str) -> None:
            return None

        def step(self) -> int:
            return 7

        def log(self, event: str, kind: str, at_step: int, what: str) -> None:
            self.logged.append((event, kind))

    def fault(name: str, run: Training, dice: Random) -> str:
        if name == order(SEED, 3)[2]:
            raise Missed("nothing there")
        happened.append(name)
        return "done"

    for name in FAULTS:
        monkeypatch.setitem(FAULTS, name, lambda run, dice, name=name: fault(name, run, dice))
    monkeypatch.setattr(soak.time, "sleep", lambda seconds: None)
    run = Training()
    counted = soak.disturb(run, 1e9, SEED)  # type: ignore[arg-type]
    assert run.logged == [("missed" if number == 2 else "fault", name) for number, name in enumerate(order(SEED, 4))]
    assert counted == Counter(happened) and len(happened) == 3
