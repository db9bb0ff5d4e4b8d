"""One process and several, under every engine and layout, compute the same: gradients are summed once, over uneven
numbers of targets."""

import json

import pytest
import torch

from model.llama import Llama, initialise
from pipeline.data.loader import pack
from tests.parallel.matrix import CASES, STORED, TABLE, difference, machine, results, run
from tests.parallel.train_steps import MODEL, windows

COMPARED = [case.name for case in CASES.values() if case.reference is not None]


@pytest.mark.parametrize("name", COMPARED)
def test_every_layout_computes_the_same(name):
    assert difference(name) <= CASES[name].bound


def test_initial_weights_depend_on_neither_ranks_nor_engine():
    names = [name for name, case in CASES.items() if not case.settings.get("tied")]
    digests = {name: run(name)["initial"] for name in names}
    assert len(set(digests.values())) == 1, digests


def test_losses_are_those_that_were_stored():
    """To the last bit on the machine and torch that they were stored on; elsewhere libraries may round otherwise."""
    stored, found = json.loads(STORED.read_text()), run("one process, float64")["results"]
    if stored["machine"] == machine():
        assert found == stored["results"]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(stored["results"]), rtol=1e-9, atol=0)


def test_the_first_loss_and_gradient_are_those_of_the_plain_model():
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


def test_the_documented_table_is_of_these_cases():
    rows = [line.split("|")[1].strip() for line in TABLE.read_text().splitlines() if line.startswith("| ")][1:]
    assert rows == COMPARED, "run `make matrix`"
