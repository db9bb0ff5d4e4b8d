"""One process and several, under every engine and layout, compute the same: gradients are summed once, over uneven
numbers of targets, and every parameter gets its own whatever the options that meet."""

import json
import re

import pytest
import torch

from model.llama import Llama, initialise
from pipeline.data.loader import pack
from tests.parallel.crossing import every, pairs, pairwise
from tests.parallel.groups import CaseError, end_groups, run_case
from tests.parallel.matrix import (
    ATTENTION,
    CASES,
    LAYOUTS,
    OPTIONS,
    OTHERS,
    STORED,
    TABLE,
    Case,
    covering,
    differences,
    full_product,
    kind_of,
    lacks,
    machine,
    results,
    run,
)
from tests.parallel.train_steps import MODEL, model_of, windows

COMPARED = [case.name for case in LAYOUTS if case.reference is not None]
TIED = [name for name, case in CASES.items() if case.settings.get("tied")]


@pytest.fixture(scope="module", autouse=True)
def groups_end():
    """Ranks that wait for another case cost processor time, which the tests after these want."""
    yield
    end_groups()


@pytest.mark.parametrize("name", [*COMPARED, *(case.name for case in (*covering(), *ATTENTION))])
def test_every_layout_computes_the_same(name):
    if lack := lacks(CASES[name]):
        pytest.skip(lack)
    away = differences(name)
    model = Llama(model_of(shape=CASES[name].settings.get("shape")))
    assert away.keys() == {"loss and norm"} | {parameter for parameter, _ in model.named_parameters()} - (
        {"output.weight"} if name in TIED else set())
    assert {what: value for what, value in away.items() if not value <= CASES[name].allows(what)} == {}


def test_initial_weights_depend_on_neither_ranks_nor_engine():
    digests = {name: run(name)["initial"] for name in COMPARED
               if not lacks(CASES[name]) and not CASES[name].settings.get("shape")}
    assert len(set(digests.values())) == 1, digests


@pytest.mark.parametrize("severed, parallel, names", [
    ("tok_embeddings", {"tp": 2}, "tok_embeddings.weight, of 30 parameters"),
    ("layers.1.attention", {}, ".wq.weight, layers.1.attention.wk.weight, layers.1.attention.wv.weight and 2 more, of"),
    ("tok_embeddings", {"engine": "deepspeed", "zero_stage": 2}, "tok_embeddings.weight, of 30 parameters"),
    ("layers.0.feed_forward", {"engine": "deepspeed", "zero_stage": 3}, "layers.0.feed_forward.w1.weight, "),
])
def test_a_parameter_without_a_gradient_stops_training_by_name(severed, parallel, names):
    case = Case("to fail", ranks=2, settings={"precision": "fp32", "severed": severed, "parallel": parallel})
    if lack := lacks(case):
        pytest.skip(lack)
    with pytest.raises(CaseError, match=f"UserError: Training stopped in its first step.*{re.escape(names)}"):
        run_case(case.ranks, f"{case.name}, {kind_of(case)}", case.settings)


def test_gradients_that_are_reduced_once_meet_once_a_step():
    def reduced(reduce):
        return run_case(2, "", {"body": "tests.parallel.train_steps:reductions", "steps": 1, "accumulation": 4,
                                "parallel": {"reduce": reduce}})["calls"]
    groups = MODEL.layers + 1  # each block, and what is around them
    assert (reduced("each"), reduced("last")) == (4 * groups, groups)


def test_pairwise_combinations_hold_every_pair():
    factors = {"a": (1, 2, 3), "b": (1, 2, 3, 4), "c": (False, True), "d": (False, True)}
    found = pairwise(factors)
    assert set().union(*map(pairs, found)) == set().union(*map(pairs, every(factors))) and len(found) <= 15


def test_the_full_product_turns_the_other_options_so_that_each_meets_each():
    cases = full_product().values()
    found = {(value, other) for case in cases for value in options(case) for other in others(case)}
    assert len(cases) == 6 * 3 * 4 * 2
    assert len(found) == (6 + 3 + 4 + 2) * len(every(OTHERS)), "of fifteen values each meets all eight combinations"


def options(case):
    """The values of the four crossed options in a case of the full product."""
    return next(list(zip(OPTIONS, (layout, backend, checkpointing, tied), strict=True))
                for (layout, tied, backend, checkpointing), known in full_product().items() if known == case)


def others(case):
    """The other options, as one value."""
    return [(case.settings["accumulation"], case.settings["train"]["across_documents"],
             case.settings["parallel"]["reshard"])]


def test_losses_are_those_that_were_stored():
    """To the last bit on the machine and torch that they were stored on; elsewhere libraries may round otherwise."""
    stored, found = json.loads(STORED.read_text()), run("one process, 50 steps")["results"]
    if stored["machine"] == machine():
        assert found == stored["results"]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(stored["results"]), rtol=1e-9, atol=0)


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
    layouts, crossed, attention = ([line.split("|") for line in part.splitlines() if line.startswith("| ")][1:]
                                   for part in re.split("## Options|## Attention", TABLE.read_text()))
    assert [row[1].strip() for row in layouts] == COMPARED, "run `make matrix`"
    assert [len(row) for row in crossed] == [12] * 18, "run `make matrix`"
    assert [row[1].strip() for row in attention] == [case.name for case in ATTENTION], "run `make matrix`"
