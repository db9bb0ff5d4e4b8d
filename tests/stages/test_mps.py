"""Training and evaluation on Apple's GPU, of which there is none here. The CPU stands in for it: all that is done
otherwise on `mps` is done, and float64, complex numbers and collectives are refused where that GPU would compute."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from drover.model import devices, rope
from drover.model.attention.backend import Where, choose
from drover.model.llama import Llama
from drover.pipeline.core.files import read_json
from drover.pipeline.parallel import ranks
from drover.pipeline.training import optimizers
from drover.pipeline.training.engine import FsdpEngine
from tests.refusal import refused
from tests.stages.here import run_here
from tests.stages.training import curve, events, train_folder
from tests.training.engine_kit import MODEL

CANNOT = {torch.float64, torch.complex64, torch.complex128}


class AsOnMps(TorchDispatchMode):
    """Refuses what that GPU cannot do, but of single numbers, which may lie on the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        assert func.namespace != "c10d", func
        for tensor in tree_leaves(made):
            assert not (isinstance(tensor, torch.Tensor) and tensor.ndim and tensor.dtype in CANNOT), func
        return made


@pytest.fixture
def stand_in(monkeypatch):
    """The CPU is `mps`, and computes as that has to from the second step on (tables are made in the first)."""
    for module in (devices, rope, ranks, optimizers):
        monkeypatch.setattr(module, "is_mps", lambda device: True)
    monkeypatch.setattr(ranks, "find_device", {"mps": torch.device("cpu")}.get)
    accumulate, watched = FsdpEngine.accumulate, []

    def watch(engine, *arguments):
        if not engine.proven:
            return accumulate(engine, *arguments)
        watched.append(engine)
        with AsOnMps():
            return accumulate(engine, *arguments)
    monkeypatch.setattr(FsdpEngine, "accumulate", watch)
    return watched


@pytest.mark.slow
def test_a_model_trained_and_measured_as_on_mps_is_the_one_of_the_cpu(fresh, stand_in, monkeypatch):
    def chain(name, device):
        """Losses and norms of training, bits per byte of the evaluation."""
        for stage in ("train", "convert", "evaluate"):
            assert run_here(stage, fresh, f"name={name}", f"launch.device={device}", "train.precision=fp32") == 0
        result = read_json(train_folder(fresh, name).parent / "evaluate/results.json")["validation"]["sources"]
        return [record[key] for record in curve(fresh, name) for key in ("loss", "grad_norm")] + [
            entry["bits_per_byte"] for entry in result.values()]

    measured = chain("apple", "mps")
    assert len(stand_in) == len(curve(fresh, "apple")) - 1
    assert events(fresh, "start", "apple")[0]["device"] == "Apple GPU (mps)"
    monkeypatch.undo()
    assert measured == pytest.approx(chain("plain", "cpu"), rel=1e-4)


def test_all_tensors_of_a_pass_lie_on_the_device(monkeypatch):
    """Here tensors without contents stand in: torch mixes them with those of a CPU no more than those of a GPU."""
    for module in (devices, rope):
        monkeypatch.setattr(module, "is_mps", lambda device: device.type == "meta")
    device = torch.device("meta")
    with device:
        model = Llama(MODEL)
    model.backend = choose("auto", Where(torch.device("mps"), torch.float32, compiled=False, head_dim=16)).backend
    tokens = torch.zeros(2, 16, dtype=torch.int64, device=device)
    where = {"documents": tokens, "positions": tokens, "document_lengths": [16, 16]}
    model(tokens, tokens, **where)
    with AsOnMps():
        model(tokens, tokens, **where).backward()
    assert {weight.grad.device for weight in model.parameters()} == {device}
    refused(RuntimeError, "device", model, tokens, torch.zeros(2, 16, dtype=torch.int64), **where)
