"""The train stage in fp8: `auto` stays in it. What it computes, tests/parallel/test_fp8.py shows."""

import pytest

from tests.stages.training import events, manifest_of, run_train

pytestmark = pytest.mark.slow
pytest.importorskip("torchao", reason="torchao is not installed, which fp8 needs: pip install --editable '.[fp8]'")


def test_auto_stays_in_fp8_and_another_precision_is_recorded(fresh):
    settings = ["train.precision=fp8", "train.fp8_skip=['*.wk']", "train.micro_batch=4", "parallel.pp=2"]
    run_train(fresh, *settings, ranks=2)
    longer = [*settings, "train.precision=auto", "train.steps=13", "--accept-changes"]
    output = run_train(fresh, *longer, ranks=2).stdout
    assert "fp8, as the run started" in output and "fp8 (rowwise) in 12 linear layers" in output
    run_train(fresh, *settings, "train.precision=bf16", "train.steps=14", "--accept-changes", ranks=2)
    starts = [event["precision"] for kind in ("start", "resume") for event in events(fresh, kind)]
    assert starts == ["fp8", "fp8", "bf16"] and manifest_of(fresh).counts["precision"] == "bf16"
