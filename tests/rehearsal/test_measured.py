"""A rehearsal against ranks that are there: the same recorder on fakes and on gloo."""

import pytest

from drover.pipeline.rehearsal.apart import rehearse_apart
from tests.parallel.conftest import groups_end  # noqa: F401 - a fixture of all
from tests.parallel.groups import run_case
from tests.rehearsal.measured import config_of, measured

CLOSE = 0.05


@pytest.mark.parametrize("ranks, gpu, settings", [
    (2, True, {"parallel": {}}),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        (4, False, {"parallel": {"pp": 2, "pp_schedule": "interleaved", "tp": 2}}),
        (4, True, {"parallel": {"dp_replicate": 2, "reshard": "never"},
                   "train": {"optimizer": "muon", "activation_checkpointing": "selective"}}),
        (8, True, {"parallel": {"pp": 2, "cp": 2, "tp": 2}}))),
], ids=["FSDP2", "pipeline x tensor", "HSDP, Muon", "pipeline x context x tensor"])
def test_a_rehearsed_step_is_the_measured_one(ranks, gpu, settings):
    """Calls and bytes of each collective in each group are equal, and so is the peak of memory, kind by kind; in a
    pipeline, where it depends on how fast others are, to 5%. torch's allocator, which also counts what kernels take for
    a moment, has no more than 5% more where the kernels are its own and gloo copies little."""
    real_ranks = run_case(ranks, measured, "rehearsal", gpu=gpu, **settings)["ranks"]
    looked_at = [0, ranks - 1]
    rehearsed = rehearse_apart(config_of(**settings), ranks, looked_at, gpu=gpu, all_micro_batches=True)
    for rank, fake in zip(looked_at, (one.as_json() for one in rehearsed), strict=True):
        real = real_ranks[rank]
        assert fake["collectives"] == real["collectives"]
        assert sum(channel["calls"] for channel in fake["collectives"]) > 20
        assert fake["kinds"] == real["kinds"] or "pp" in settings["parallel"]
        assert fake["peak_bytes"] == sum(fake["kinds"].values()) == pytest.approx(real["peak_bytes"], rel=CLOSE)
        if not gpu:
            assert fake["peak_bytes"] == pytest.approx(real["allocated"], rel=CLOSE)
