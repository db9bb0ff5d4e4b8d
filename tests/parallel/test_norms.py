"""Norms of every parameter's gradient, weight and update are those of the whole tensors, however these are spread."""

import numpy as np
import pytest

from drover.pipeline.training.monitor import layer_norms
from tests.parallel.groups import run_case
from tests.parallel.matrix import Case, kind_of, lacks
from tests.parallel.train_steps import norms


@pytest.mark.parametrize("ranks, settings", [
    (1, {}), (2, {"tied": True, "backend": "aot_eager"}), (4, {"parallel": {"dp_replicate": 2}}),
    (2, {"parallel": {"tp": 2}, "train": {"optimizer": "muon"}}),
    (4, {"parallel": {"pp": 2, "pp_schedule": "interleaved"}, "shape": {"layers": 4}, "tied": True, "accumulation": 2}),
    *(pytest.param(2, {"parallel": {"engine": "deepspeed", "zero_stage": stage}, "precision": "fp32"},
                   marks=pytest.mark.slow) for stage in (1, 3))])
def test_norms_are_those_of_whole_tensors(ranks, settings):
    case = Case("norms", ranks=ranks, settings={"steps": 3, **settings})
    if lack := lacks(case):
        pytest.skip(lack)
    result = run_case(ranks, norms, kind_of(case), **case.settings)
    assert len(result["norms"]) == 3
    for measured, computed, (_, total) in zip(result["norms"], result["computed"], result["results"], strict=True):
        assert set(measured) == set(computed) and len(measured) > 20
        for name, expected in computed.items():
            np.testing.assert_allclose(measured[name], expected, rtol=2e-5, err_msg=name)
        assert sum(values[0] ** 2 for values in measured.values()) ** 0.5 == pytest.approx(total, rel=1e-5)


def test_of_a_layer_they_are_those_of_its_parameters_together():
    parameters = {"tok_embeddings.weight": (1.0, 2.0, 3.0), "layers.11.attention.wq.weight": (3.0, 1.0, 0.0),
                  "layers.11.ffn_norm.weight": (4.0, 0.0, "nan"), "layers.1.ffn_norm.weight": (0.5, "inf", 0.0)}
    assert layer_norms(parameters) == {
        "gradient_norms": {"tok_embeddings": 1.0, "layers.11": 5.0, "layers.1": 0.5},
        "weight_norms": {"tok_embeddings": 2.0, "layers.11": 1.0, "layers.1": "inf"},
        "update_norms": {"tok_embeddings": 3.0, "layers.11": "nan", "layers.1": 0.0}}
