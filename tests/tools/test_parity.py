"""The gate between two runs: what is within the band passes, what is worse, or cannot be compared, does not."""

import json

import pytest

from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import append_line
from drover.tools.parity import main, report, windows
from tests.refusal import refused, table


def records(worse=lambda step: 1.0, first=0, **fields):
    """Forty steps whose loss falls; `worse` multiplies it."""
    return [{"step": step, "samples": [first + 4 * step, first + 4 * step + 4], "loss": 200 / (20 + step) * worse(step),
             **fields} for step in range(1, 41)]


@pytest.mark.parametrize(("first", "last", "times", "sound"), table("""
    1 -> 40 -> 1.0 -> true
    1 -> 40 -> 1.009 -> true
    1 -> 40 -> 0.9 -> true
    1 -> 40 -> 1.011 -> false
    1 -> 8 -> 2.0 -> true
    37 -> 40 -> 1.05 -> false
    30 -> 30 -> nan -> false""", int, int, float, json.loads))
def test_the_losses_are_judged_window_by_window(first, last, times, sound):
    """The first windows, while it warms up, are not."""
    lines, found = report(records(), records(lambda step: times if first <= step <= last else 1.0), 0.01)
    assert found == sound and ("BEYOND" not in "".join(lines)) == sound


def test_validation_text_is_judged_and_what_becomes_zero_is_told():
    found = records(validation_bpb={"code": 1.02}, fp8_gradient_zeros=0.125)
    lines, sound = report(records(validation_bpb={"code": 1.0}), found, 0.01)
    assert not sound and "validation text code: 1.0000, 1.0200 bits per byte (+2.00%), BEYOND" in lines
    assert "gradients: at most 12.50% of a layer's values become zero in fp8, as last measured" in lines
    assert report(records(validation_bpb={"code": 1.0}), found, 0.03)[1]


def test_runs_on_other_samples_or_with_few_steps_are_not_compared():
    refused(UserError, "In step 1 the two runs saw other samples", windows, records(), records(first=1))
    refused(UserError, "have 9 logged steps in common", windows, records(), records()[:9])


def test_the_command_says_so_by_its_exit_status(tmp_path, capsys):
    for name, worse in (("a", 1.0), ("b", 1.1)):
        for line in records(lambda step, worse=worse: worse):
            append_line(tmp_path / name / "train/metrics.jsonl", line)
    for name in "abc":
        (tmp_path / name / "launch").mkdir(parents=True)
    for name, status, said in (("a", 0, "within the band of 1.00%"), ("b", 1, "BEYOND the band"),
                               ("c", 2, "is no run that has trained")):
        assert main(["--reference", str(tmp_path / "a"), "--run", str(tmp_path / name)]) == status
        assert said in "".join(capsys.readouterr())
