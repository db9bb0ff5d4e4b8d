"""Which documents a step saw: as logged, around what rollbacks left out, and for steps that are still to come."""

import re
import shlex

import pytest

from drover.pipeline.core.files import append_line
from drover.pipeline.records.metrics import OTHER_ORDER
from drover.tools.trace.__main__ import main
from tests.refusal import printed, table
from tests.tools.recorded import Recorded


@pytest.fixture(scope="module")
def recorded(tmp_path_factory, encoded):
    """A run that left out samples [192, 208) and [368, 384), of steps 13 and 23, and skipped the update of step 8."""
    return Recorded(tmp_path_factory.mktemp("where") / "mini", encoded)


def shown(capsys, recorded, words):
    """First lines, and the sample numbers of the pieces, each once."""
    output = printed(capsys, main, "--run", recorded.folder, *words.split())
    head, *pieces = re.split(r"^(?=sample )", output, flags=re.M)
    return head, sorted({int(piece.split()[1]) for piece in pieces})


@pytest.mark.parametrize("step, first", [(1, 0), (13, 208), (31, 512)])
def test_a_step_is_shown_with_its_own_samples(capsys, recorded, step, first):
    head, numbers = shown(capsys, recorded, f"--step {step}")
    assert f"step {step}: samples [{first}, {first + 16})" in head and numbers == list(range(first, first + 16))
    assert ("planned samples" in head) == (step > 30)


def test_a_skipped_step_and_samples_that_were_left_out(capsys, recorded):
    head, numbers = shown(capsys, recorded, "--step 8")
    assert "step 8 was skipped (nonfinite)" in head and numbers == list(range(112, 128))
    assert shown(capsys, recorded, "--samples 192 195") == ("samples [192, 195)\n", [192, 193, 194])


@pytest.mark.parametrize(("arguments",), table("""
    --step 0
    --samples 5 5""", shlex.split))
def test_what_makes_no_sense_is_refused(capsys, recorded, arguments):
    assert "asked: " in printed(capsys, main, "--run", recorded.folder, *arguments, expect=2)


def test_changed_settings_are_warned_of_if_they_changed_the_data(capsys, recorded):
    for changes, warned in (["train.lr: 0.01 -> 0.02"], 0), ([OTHER_ORDER], 1):
        append_line(recorded.train / "events.jsonl", {
            "event": "plan_changed", "step": 10, "number": 0, "accepted": changes, "changes": changes})
        assert main(["--run", str(recorded.folder), "--step", "3"]) == 0
        assert capsys.readouterr().err.count("after step 10 this run continued with other text") == warned
