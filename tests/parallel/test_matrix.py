"""One process and several, under every engine and layout, compute the same: gradients are summed once, over uneven
numbers of targets, and every parameter gets its own whatever the options that meet."""

import json
import re
from collections import Counter

import numpy as np
import pytest
import torch

from drover.model.llama import Llama, initialise
from drover.pipeline.data.sampling.batch import pack
from tests.parallel.groups import CaseError, run_case
from tests.parallel.matrix import (
    ATTENTION,
    CASES,
    CROSSED,
    LAYOUTS,
    STORED,
    Case,
    crossed_covering,
    differences,
    few,
    kind_of,
    lacks,
    results,
    run,
)
from tests.parallel.matrix_table import TABLE, machine
from tests.parallel.train_steps import MODEL, model_of, passes, reduced_early, traffic, train_steps, windows
from tests.refusal import refused

RUN = [*LAYOUTS, *crossed_covering(), *ATTENTION]
FEW = few(RUN)
TIED = [name for name, case in CASES.items() if case.settings.get("tied")]


@pytest.mark.parametrize("name", [
    pytest.param(case.name, marks=() if case in FEW else pytest.mark.slow) for case in RUN])
def test_every_layout_computes_the_same(name):
    if lack := lacks(CASES[name]):
        pytest.skip(lack)
    away = differences(name)
    model = Llama(model_of(shape=CASES[name].settings.get("shape")))
    assert away.keys() == {"loss and norm"} | {parameter for parameter, _ in model.named_parameters()} - (
        {"output.weight"} if name in TIED else set())
    assert {what: value for what, value in away.items() if not value <= CASES[name].allows(what)} == {}


@pytest.mark.parametrize("severed, parallel, names", [
    ("tok_embeddings", {"tp": 2}, "tok_embeddings.weight, of 30 parameters"),
    ("layers.1.attention", {}, ".wq.weight, layers.1.attention.wk.weight, layers.1.attention.wv.weight and 2 more, of"),
    pytest.param("tok_embeddings", {"engine": "deepspeed", "zero_stage": 2}, "tok_embeddings.weight, of 30 parameters",
                 marks=pytest.mark.slow),
    ("layers.0.feed_forward", {"engine": "deepspeed", "zero_stage": 3}, "layers.0.feed_forward.w1.weight, "),
])
def test_a_parameter_without_a_gradient_stops_training_by_name(severed, parallel, names):
    case = Case("to fail", ranks=2, settings={"precision": "fp32", "severed": severed, "parallel": parallel})
    if lack := lacks(case):
        pytest.skip(lack)
    refused(CaseError, f"UserError: Training stopped in its first step.*{re.escape(names)}", run_case, case.ranks,
            train_steps, kind_of(case), **case.settings)


@pytest.mark.parametrize("tied, units", [(False, MODEL.layers + 2), (True, MODEL.layers + 1)])
def test_gradients_that_are_reduced_once_meet_once_a_step(tied, units):
    """Of the embedding, each block and the head, which are one where they are tied."""
    result = {reduce: run_case(2, traffic, steps=1, accumulation=4, tied=tied, parallel={"reduce": reduce})
              for reduce in ("each", "last")}
    assert {reduce: counts["reductions"] for reduce, counts in result.items()} == {"each": 4 * units, "last": units}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("reshard", ["always", "never"])
def test_weights_are_asked_for_one_unit_ahead_and_no_more_often_than_needed(tied, reshard):
    layers = MODEL.layers
    result = run_case(2, traffic, steps=1, accumulation=2, tied=tied, parallel={"reshard": reshard})
    once, again = layers + (1 if tied else 2), layers if reshard == "always" else 0
    # Only blocks are gathered for the backward pass: the embedding needs no weights there, and the head kept them.
    assert result["gathers"] == (2 * (once + again) if reshard == "always" else once)
    modules = ["tok_embeddings", *(f"layers.{index}" for index in range(layers)), "output"]
    assert result["forward"] == [(name, min(2 + index, once)) for index, name in enumerate(modules)]
    assert result["backward"] == [(f"layers.{index}", once + min(again, layers - index))
                                 for index in reversed(range(layers))]


@pytest.mark.parametrize("schedule, stages, layers, tied, ahead", [
    ("1f1b", 1, 6, False, [0, 1, 2]), ("interleaved", 3, 12, True, [0, 1, 0, 1, 0, 1])])
def test_a_pipeline_reduces_gradients_while_it_computes(schedule, stages, layers, tied, ahead):
    """Each block's from when it has them; torch's stage waits until all of its blocks have."""
    parallel = {"pp": 2, "pp_schedule": schedule, **({"pp_stages": stages} if stages > 1 else {})}
    ours, theirs = (run_case(4, reduced_early, torchs=torchs, accumulation=2, tied=tied, shape={"layers": layers},
                              parallel=parallel) for torchs in (False, True))
    assert ours["results"] == theirs["results"] and ours["blocks"] == theirs["blocks"]
    for mine, golden in zip(ours["gradients"], theirs["gradients"], strict=True):
        assert set(mine) == set(golden) and len(mine) == layers * 9 + 3 - tied
        assert all(np.array_equal(mine[name], golden[name]) for name in golden)
    assert [mine - other for mine, other in zip(ours["begun"], theirs["begun"], strict=True)] == ahead


KEPT = {"backend": "aot_eager", "parallel": {"reshard": "never"}, "train": {"activation_checkpointing": "full"}}


@pytest.mark.parametrize("layout, tied, options", [
    ("FSDP2 x 2", False, {}), ("FSDP2 x tensor parallel 2 x 2", False, {}), ("FSDP2 x 2", True, KEPT)])
def test_losses_and_logits_between_steps_are_those_of_one_process(layout, tied, options):
    """Each pass calls the output matrix in its own way, and none leaves behind what disturbs the next step."""
    ranks, parallel = CROSSED[layout]
    expected = run_case(1, passes, steps=3, tied=tied)
    result = run_case(ranks, passes, steps=3, tied=tied,
                     **{**options, "parallel": {**parallel, **options.get("parallel", {})}})
    np.testing.assert_allclose(result["results"], expected["results"], rtol=1e-12)
    for mine, golden in zip(result["passes"], expected["passes"], strict=True):
        for name, value in golden.items():
            np.testing.assert_allclose(mine[name], value, rtol=1e-11, atol=1e-13, err_msg=name)


def test_losses_are_those_that_were_stored():
    """To the last bit on the machine and torch that they were stored on; elsewhere libraries may round otherwise."""
    stored, result = json.loads(STORED.read_text()), run("one process, 50 steps")["results"]
    if stored["machine"] == machine():
        assert result == stored["results"]
    torch.testing.assert_close(torch.tensor(result), torch.tensor(stored["results"]), rtol=1e-9, atol=0)


def test_the_first_loss_and_gradients_are_those_of_the_plain_model():
    """No FSDP, no chunks of ours: torch's own cross-entropy on an unsharded model."""
    model = Llama(MODEL).double()
    initialise(model, MODEL, seed=0)
    batch = pack(windows(0))
    logits = model(batch.tokens, documents=batch.documents, positions=batch.positions)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
    loss.backward()
    norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
    torch.testing.assert_close(results("one process, float64")[0], torch.stack([loss.detach(), norm]), rtol=1e-12,
                               atol=0)
    for name, gradient in run("one process, float64")["gradients"][0].items():
        torch.testing.assert_close(torch.from_numpy(gradient), model.get_parameter(name).grad, rtol=1e-9, atol=1e-15)


def test_the_documented_table_is_of_these_cases():
    layouts, crossed, attention = ([[cell.strip() for cell in row.split("|")] for row in part.splitlines()
                                    if row.startswith("| ")][2:]
                                   for part in re.split("## Options|## Attention", TABLE.read_text()))
    cases = [name for _, name, *_ in layouts if not name.startswith("**")]
    assert sorted(cases) == sorted(case.name for case in LAYOUTS), "run `make matrix`"
    assert [layout for _, layout, *_ in crossed] == list(CROSSED), "run `make matrix`"
    counts = Counter(tuple(case.name.split(", ")[:2]) for case in ATTENTION)
    assert {(kind, layout): int(count) for _, layout, kind, count, *_ in attention} == counts, "run `make matrix`"
