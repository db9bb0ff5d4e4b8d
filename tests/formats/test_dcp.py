"""Checkpoints of torch.distributed.checkpoint with torchtitan's Llama 3: what one or two ranks saved is read, torch
loads what is written, and a pickle or a file that is none of theirs is refused and not executed."""

import json
import pickle
import random

import pytest
import torch
import torch.distributed.checkpoint as dcp

from drover.model.config import ModelConfig
from drover.model.huggingface import config_to_json
from drover.pipeline.core.errors import UserError
from drover.pipeline.formats.dcp import dcp_files, refuse_other_networks
from drover.pipeline.formats.huggingface import Source, write_folder
from drover.pipeline.formats.weights import load_model, open_weights
from tests.conftest import run_python
from tests.formats.cutting import read_alike
from tests.formats.exporting import Hostile
from tests.refusal import refused
from tests.tiny_models import opinionated

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
SHAPE = ModelConfig(dim=48, layers=2, heads=6, kv_heads=2, ffn_dim=80, vocab_size=90, context_length=64)
LATER = {"attention.wq.": "attention.qkv_linear.wq.", "attention.wk.": "attention.qkv_linear.wk.",
         "attention.wv.": "attention.qkv_linear.wv.", "output.": "lm_head."}
"""Names since torchtitan 0.3, and before."""


def later(name):
    for before, since in LATER.items():
        name = name.replace(before, since)
    return name


def state_the_shape(folder, config):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_to_json(config, torch.float32)))


@pytest.fixture(params=[False, True])
def model(request):
    """With an output matrix of its own, and tied to the embedding."""
    return opinionated(SHAPE.model_copy(update={"tied_embeddings": request.param}))


@pytest.fixture
def saved(tmp_path):
    """A checkpoint of one rank."""
    model = opinionated(SHAPE)
    state_the_shape(tmp_path, SHAPE)
    dcp.save(model.state_dict(), checkpoint_id=tmp_path)
    return tmp_path


@pytest.mark.parametrize("named", [str, later, "model.{}".format], ids=["before", "since", "prefix"])
def test_what_torchtitan_saved_is_read(model, named, tmp_path):
    """Among the states of optimizer and training."""
    state_the_shape(tmp_path, model.config)
    weights = {named(name): tensor for name, tensor in model.state_dict().items()}
    others = {"optimizer": {"state": {"norm.weight": {"exp_avg": torch.ones(3)}}}, "freqs_cis": torch.ones(2),
              "train_state": {"step": 3}}
    dcp.save({**weights, **others}, checkpoint_id=tmp_path)
    tokens = torch.randint(0, 60, (2, 17), generator=torch.Generator().manual_seed(0))
    with open_weights(tmp_path) as opened:
        read_alike(opened, model, random.Random(7))
        assert torch.equal(load_model(opened, torch.device("cpu"), torch.float32)(tokens), model.eval()(tokens))


@pytest.mark.parametrize("named", [str, later], ids=["before", "since"])
def test_torch_loads_what_is_written(model, named, tmp_path):
    """By the names of both versions, a tied output matrix too."""
    state = model.state_dict()
    write_folder(tmp_path, dcp_files(Source(model.config, torch.float32, state.__getitem__), {"eos_token_id": 7}))
    loaded = {named(name): torch.zeros_like(tensor) for name, tensor in state.items()}
    dcp.load(loaded, checkpoint_id=tmp_path)
    assert all(torch.equal(loaded[named(name)], tensor) for name, tensor in state.items())
    with open_weights(tmp_path) as opened:
        read_alike(opened, model, random.Random(7))
    assert json.loads((tmp_path / "config.json").read_text())["eos_token_id"] == 7


SAVE = """
import sys, torch
import torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from drover.pipeline.formats.weights import open_weights, load_model
from pathlib import Path
dist.init_process_group("gloo")
with open_weights(Path(sys.argv[1])) as weights:
    model = load_model(weights, torch.device("cpu"), torch.float32).requires_grad_()
for layer in model.layers:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
model(torch.ones(1, 8, dtype=torch.int64)).sum().backward()
optimizer.step()
of_model, of_optimizer = get_state_dict(model, optimizer)
dcp.save({**of_model, "optimizer": of_optimizer}, checkpoint_id=sys.argv[2])
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_what_two_ranks_saved_is_read(saved, tmp_path):
    script, made = tmp_path / "save.py", tmp_path / "two"
    script.write_text(SAVE)
    run_python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script, saved, made,
               OMP_NUM_THREADS="1")
    assert len([*made.glob("*.distcp")]) == 2
    state_the_shape(made, SHAPE)
    with open_weights(made) as opened:
        read_alike(opened, opinionated(SHAPE), random.Random(7))


def change_list(folder, change):
    path = folder / ".metadata"
    listed = pickle.loads(path.read_bytes())
    change(listed)
    path.write_bytes(pickle.dumps(listed))


def test_what_is_no_such_checkpoint_is_refused_and_not_executed(saved, tmp_path):
    whole = (saved / ".metadata").read_bytes()

    def refusal(change):
        change_list(saved, change)
        message = refused(UserError, None, open_weights, saved)
        (saved / ".metadata").write_bytes(whole)
        return message
    assert "it names posix.mkdir, which no checkpoint of torch has; nothing of it was executed" in refusal(
        lambda listed: setattr(listed, "planner_data", Hostile(tmp_path / "made")))
    assert not (tmp_path / "made").exists()
    assert "'../x', which is not a file in its folder" in refusal(
        lambda listed: [setattr(place, "relative_path", "../x") for place in listed.storage_data.values()])
    assert "of norm.weight, parts are missing" in refusal(
        lambda listed: listed.state_dict_metadata["norm.weight"].chunks.clear())
    assert "layers.0.moe.router.weight is no parameter of a Llama of 2 layers" in refusal(
        lambda listed: listed.state_dict_metadata.update(
            {"layers.0.moe.router.weight": listed.state_dict_metadata["norm.weight"]}))
    (saved / ".metadata").write_bytes(whole[:-9])
    refused(UserError, "is not the list of a checkpoint", open_weights, saved)
    (saved / ".metadata").write_bytes(whole)
    values = opinionated(SHAPE).output.weight.detach().numpy().tobytes()
    data = (saved / "__0_0.distcp").read_bytes()
    for damaged, message in ((data[:5000], "cannot be read"), (data.replace(values, values[::-1]), "its checksum")):
        (saved / "__0_0.distcp").write_bytes(damaged)
        with open_weights(saved) as weights:
            refused(UserError, message, weights.read, "output.weight")
    (saved / "config.json").unlink()
    refused(UserError, "how many heads its network of 2 layers has", open_weights, saved)


def test_other_networks_are_not_written():
    refuse_other_networks(SHAPE)
    refused(UserError, "as wide as the model", refuse_other_networks, SHAPE.model_copy(update={"head_dim": 16}))
