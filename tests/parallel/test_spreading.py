"""One process and several compute the same: gradients are summed once, over uneven numbers of targets."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from model.config import ModelConfig
from model.llama import Llama, initialise
from pipeline.data.loader import pack
from tests.parallel.train_steps import windows

REPOSITORY = Path(__file__).resolve().parents[2]


@functools.cache
def losses(ranks=1, precision="float64", checkpointing="none", micro_batch=8, replicate=1, tied="untied"):
    """Losses and gradient norms of twelve steps on so many gloo ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
               "tests/parallel/train_steps.py", precision, checkpointing, str(micro_batch), str(replicate), tied]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300, check=False,
                            env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stderr
    return torch.tensor(json.loads(result.stdout.splitlines()[-1]), dtype=torch.float64)


def relative(a, b):
    return float(((a - b).abs() / a.abs()).max())


@pytest.mark.parametrize("layout", [{"ranks": 2, "micro_batch": 4}, {"ranks": 2, "micro_batch": 1},
                                    {"ranks": 4, "micro_batch": 2, "replicate": 2}, {"micro_batch": 2}],
                         ids=["2 ranks", "2 ranks, accumulation 4", "2 x 2 ranks (HSDP)", "accumulation 4"])
def test_ranks_and_accumulation_change_nothing_in_float64(layout):
    assert relative(losses(), losses(**layout)) < 1e-12


@pytest.mark.parametrize("tied", ["tied", "untied"])
def test_two_ranks_agree_with_one_in_float32(tied):
    assert relative(losses(precision="float32", tied=tied),
                    losses(ranks=2, precision="float32", micro_batch=4, tied=tied)) < 1e-5


@pytest.mark.parametrize("checkpointing", ["full", "selective"])
def test_activation_checkpointing_is_bit_equal(checkpointing):
    assert torch.equal(losses(precision="float32"), losses(precision="float32", checkpointing=checkpointing))


def test_bfloat16_stays_near_float32():
    assert relative(losses(precision="float32"), losses(precision="bfloat16")) < 0.05


def test_the_first_loss_and_gradient_are_those_of_the_plain_model():
    """No FSDP, no chunks of ours: torch's own cross-entropy on an unsharded model."""
    config = ModelConfig(dim=64, layers=3, heads=4, kv_heads=2, vocab_size=384, context_length=64)
    model = Llama(config).double()
    initialise(model, config, seed=0)
    batch = pack(windows(0))
    logits = model(batch.tokens, documents=batch.documents, positions=batch.positions)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
    loss.backward()
    norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
    torch.testing.assert_close(losses()[0], torch.stack([loss.detach(), norm]), rtol=1e-12, atol=0)
