"""What decides about a soak, and what it does all along; test_soak.py makes a short one."""

from collections import Counter
from itertools import islice
from types import SimpleNamespace

import pytest

from drover.pipeline.files import append_line
from drover.tools.slurm_lab import Lab
from tests.slurm import soak
from tests.slurm.soak import FAULTS, Missed, SoakRun, order

SEED = 41


def trained(folder, name, steps=3, loss=2.0):
    """Write the log of a training whose last loss may differ."""
    for step in range(1, steps + 1):
        append_line(folder / "runs" / name / "train/metrics.jsonl",
                    {"step": step, "loss": loss if step == 3 else 5.0 - step, "grad_norm": 1.0})


@pytest.mark.parametrize(("other", "audited", "report", "problems"), [
    ({}, [], "goodput", []),
    ({"loss": 2.0000001}, [], "goodput", ["step 3 differs from the undisturbed one by 5.0e-08 (bound 1e-09)"]),
    ({"loss": float("nan")}, [], "goodput", ["step 3 differs from the undisturbed one by inf (bound 1e-09)"]),
    ({"steps": 2}, ["step 2 has no line"], "words", [
        "step 2 has no line", "3 steps were logged, 2 undisturbed", "the report does not state the goodput"])])
def test_the_verdict(monkeypatch, tmp_path, other, audited, report, problems):
    trained(tmp_path, "undisturbed", **other)
    trained(tmp_path, "soak")
    (tmp_path / "runs/soak/report.html").write_text(report)
    spent = SimpleNamespace(share=0.5, wall_s=60.0, lost={"restarts": 30.0})
    monkeypatch.setattr(soak, "audit", lambda run: SimpleNamespace(faults=audited, lines=lambda: ["all proven"]))
    monkeypatch.setattr(soak, "goodput", lambda run: spent)
    lines, wrong = soak.judge(SoakRun(tmp_path, Lab(tmp_path / "lab")), Counter({"warn": 2}), 60.0)
    assert sorted(wrong) == sorted(problems)
    said = "\n".join(lines)
    assert "2: warn 2" in said and "samples      all proven" in said and "50.0%" in said


def test_faults_come_in_their_order_until_training_is_done(monkeypatch):
    """Every one comes once before any comes again; a seed repeats the order."""
    found = list(islice(order(SEED), 2 * len(FAULTS)))
    assert sorted(found[:len(FAULTS)]) == sorted(found[len(FAULTS):]) == sorted(FAULTS)
    assert found == list(islice(order(SEED), len(found))) != list(islice(order(SEED + 1), len(found)))
    logged = []

    def fault(run, dice):
        if len(logged) == 2:
            raise Missed("nothing there")
        return "done"

    monkeypatch.setattr(soak, "FAULTS", dict.fromkeys(FAULTS, fault))
    monkeypatch.setattr(soak.time, "sleep", lambda seconds: None)
    training = SimpleNamespace(  # which has another checkpoint whenever it is looked at, and is done after four faults
        wait_for_steps=lambda: len(logged) < 4, saved=lambda: [object()], done=lambda stage: False,
        step=lambda: 7,
        log=lambda event, kind, at_step, what: logged.append((event, kind)))
    counted = soak.disturb(training, 1e9, SEED)
    assert logged == [("missed" if number == 2 else "fault", name)
                      for number, name in enumerate(islice(order(SEED), 4))]
    assert counted == Counter(name for event, name in logged if event == "fault")
