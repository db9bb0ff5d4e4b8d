"""Training in phases: one curve on any ranks, killed and continued in every phase, packed or not; what is told of it is
what came of it; and what of a plan may change."""

import pytest
import yaml

from drover.tools import verify
from drover.tools.audit import audit
from tests.stages.training import (
    THREE_PHASES,
    assert_equal_but_for_rounding,
    curve,
    events,
    lines,
    manifest_of,
    proven,
    reusing,
    run_train,
    run_with_faults,
    train_and_kill,
    train_folder,
    with_phases,
)

TRAIN = {"steps": None, "precision": "fp64", "phases": THREE_PHASES, "sample_every": 6}


@pytest.fixture
def phased(tmp_path, two_sources):
    """Config of a run in phases that can train at once."""
    return reusing(two_sources, tmp_path, train=TRAIN)


KILLS = ((2, 6, []), (4, 10, ["parallel.cp=2", "parallel.tp=2"]))
"""Ranks, the step after which they are killed, and their layout."""


@pytest.mark.slow
@pytest.mark.parametrize(("packing", "kills"), [
    ("concatenate", KILLS), ("best_fit", ((1, 2, []), KILLS[0], (2, 8, ["parallel.pp=2"]), KILLS[1]))])
def test_a_run_killed_in_its_phases_goes_on_upon_other_ranks(phased, packing, kills, capsys):
    """What is damaged of a packing's plan is found later."""
    settings, train = [f"train.packing={packing}"], train_folder(phased)
    output = run_train(phased, "name=whole", *settings).stdout
    for ranks, after, layout in kills:
        train_and_kill(phased, *settings, *layout, ranks=ranks, after_step=after, log="events")
    if packing == "best_fit":
        assert " tokens of code left where the length changes" in output and output.count("  padding: ") == 3
        assert "of which there was no valid plan" in output and "best-fit packing: " in output
    run_train(phased, *settings, ranks=2)
    assert proven(phased) and proven(phased, "whole")
    assert_equal_but_for_rounding(phased, 1e-12)
    assert [record["phase"] for record in lines(phased, "whole")] == [1] * 4 + [2] * 4 + [3] * 4
    assert curve(phased)[11]["lr"] == 0
    counts, whole_counts = (manifest_of(phased, name=name).counts for name in ("mini", "whole"))
    for key in ("phases", "plan_sha256", "packing", "planned", "tokens", "steps"):
        assert counts.get(key) == whole_counts.get(key)
    if packing == "concatenate":
        assert counts["tokens"] == 20480
        return
    assert_as_counted(phased, counts)
    rest = next((train / "packing").glob("*-left-*/train/*.bins"))
    rest.write_bytes(rest.read_bytes()[:-1] + b"\xff")
    assert verify.main(["--run", str(train.parent)]) == 1
    assert rest.name in capsys.readouterr().out


def assert_as_counted(config, counts):
    """The manifest's counts of phases are those of the steps, and what was planned."""
    padding = [record["padding_share"] for record in lines(config, "whole")]
    assert 0 < max(padding) < 0.3
    learned = [phase["learned"] for phase in counts["phases"]]
    for number, (phase, size) in enumerate(zip(counts["phases"], (1024, 2048, 2048), strict=True)):
        assert learned[number] == pytest.approx(size * (4 - sum(padding[4 * number:4 * number + 4])), abs=0.5)
        assert phase["tokens"] == counts["planned"]["tokens"][number], "nothing was left out"
    assert sum(learned) == counts["tokens"]


def test_what_is_to_come_may_change_and_what_was_may_not(phased):
    """A begun run: other phases to come, a longer one that has begun; then a finished one that gets another phase. A
    step that no checkpoint has, of which the other plan is no part, counts no more."""
    run_with_faults(phased, "kill:rank=0,step=8", "train.checkpoint.background=false", expect=-9)
    assert [record["step"] for record in lines(phased)] == list(range(1, 8))
    seen = curve(phased)[:6]
    first, second, third = THREE_PHASES
    for other, message in (
            ([{**first, "until": "5k"}, second, third], "train.phases[0].until: 4k -> 5k"),
            ([first, {**second, "until": "5k"}, third],
             "train.phases[1].until: 12.29k -> 5k")):
        refused = run_train(with_phases(phased, other), expect=2).stderr
        assert all(text in refused for text in ("plan of finished steps cannot change", "step-0000000", message))
    longer = run_train(with_phases(phased, [first, {**second, "until": "16k"}, {
        "until": 20480, "sequence_length": 128, "batch_tokens": 1024, "mixture": {"code": 0, "more": 1}, "lr": 0.001,
        "warmup_steps": 1}])).stdout
    assert "plan changed: train.phases[1].until: 12.29k -> 16k" in longer
    assert "plan changed: train.phases[2].batch_tokens: 2048 -> 1024" in longer
    assert curve(phased)[:6] == seen and len(curve(phased)) == 14
    logged, counts = lines(phased), manifest_of(phased).counts
    undone = logged.pop(6)
    assert (undone["step"], [record["phase"] for record in logged[6:]]) == (7, [2] * 4 + [3] * 4)
    assert counts["tokens"] == 20480 and counts["phases"][2]["tokens"] == {"code": 0, "more": 4096}
    assert counts["step_seconds"] == pytest.approx(sum(record["step_s"] for record in logged), abs=0.001)
    [change] = events(phased, "plan_changed")
    assert change["step"] == 6 and change["number"] == 1 and len(change["changes"]) >= 3
    result = audit(train_folder(phased).parent)
    assert (result.faults, result.steps, result.repeated, result.replanned) == ([], 14, 0, 1)
    config = yaml.safe_load(phased.read_text())
    more = run_train(with_phases(phased, [*config["train"]["phases"], {
        "until": 24576, "sequence_length": 64, "batch_tokens": 2048, "lr": 0.002}]))
    assert "train.phases[3] was added" in more.stdout
    assert manifest_of(phased).counts["steps"] == 16 and proven(phased)


@pytest.mark.slow
def test_what_was_left_out_of_a_phase_that_changes_is_left_out_no_more(phased):
    """Rolled back to the beginning of a phase, which is then changed: the numbers are other text in it."""
    phases = [{"until": 12288, "sequence_length": 32, "batch_tokens": 1024},
              {"until": 28672, "sequence_length": 64, "batch_tokens": 2048, "lr": 0.005}]
    settings = ["train.guards.spike=rollback", "train.guards.spike_min_history=4", "train.checkpoint.every_steps=12",
                "train.checkpoint.background=false"]
    run_with_faults(with_phases(phased, phases), "spike:rank=0,step=18,factor=60;kill:rank=0,step=19", *settings,
                    expect=-9)
    assert [record["samples"] for record in lines(phased) if record["step"] == 18] == [[544, 608]]
    output = run_train(with_phases(phased, [phases[0], {**phases[1], "mixture": {"code": 1, "more": 0}}]),
                     *settings).stdout
    assert "plan changed: samples [544, 576), left out by the rollback from step 18, were in a phase" in output
    [change], counts = events(phased, "plan_changed"), manifest_of(phased).counts
    assert "no longer left out" in change["changes"][-1]
    assert counts["samples"] == 640 and [sum(phase["left_out"].values()) for phase in counts["phases"]] == [0, 0]
    assert {record["step"]: record["samples"] for record in curve(phased)}[18] == [544, 576] and proven(phased)
