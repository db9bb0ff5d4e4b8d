"""Faults on purpose: read strictly, announced, and each happening once, to real processes."""

from __future__ import annotations

import multiprocessing
import signal
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from pipeline.errors import UserError
from pipeline.training.fault_injection import EXIT_STATUS, KINDS, SWITCH, Fault, Faults, flip_bit, parse_faults
from tests.waiting import HANG_S, wait_for


def child(folder, rank):
    """Four steps of a rank that, asked to end, does so after its step, with status 77; what it says goes to a file."""
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    with open(folder / "said", "w", buffering=1) as file:
        faults = Faults.from_environment(rank, folder / "train", lambda text: print(text, file=file))
        for step in range(1, 5):
            faults.before_step(step, nn.Linear(2, 2), lambda: bool(asked))
            print("step", step, file=file)
            if asked:
                sys.exit(77)


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Starts `child` as a process under a switch; forked, since torch takes seconds to import."""
    def begin(switch, rank=0):
        monkeypatch.setenv(SWITCH, switch)
        process = multiprocessing.get_context("fork").Process(target=child, args=(tmp_path, rank))
        process.start()
        processes.append(process)
        return process

    processes: list[multiprocessing.process.BaseProcess] = []
    yield begin
    for process in processes:
        process.kill()


def ended(process, seconds=HANG_S):
    process.join(seconds)
    return process.exitcode


def ignores(pid, *numbers):
    """Whether a process ignores these signals."""
    mask = int(Path(f"/proc/{pid}/status").read_text().partition("SigIgn:")[2].split()[0], 16)
    return all(mask >> (number - 1) & 1 for number in numbers)


def test_the_switch_is_read_with_all_its_options():
    text = " kill:rank=1,step=5; slow:rank=0, step=3, seconds=0.5 ;;flip:rank=2,step=9,bit=31,again=1"
    assert parse_faults(text) == [
        Fault("kill", 1, 5), Fault("slow", 0, 3, seconds=0.5), Fault("flip", 2, 9, bit=31, again=1)]
    assert parse_faults("") == []


def test_a_rank_that_waits_goes_on_when_told_or_asked_to_end(start, tmp_path):
    process, faults = start("wait:rank=0,step=2; wait:rank=0,step=3"), tmp_path / "train/faults"
    wait_for(lambda: (faults / "wait-rank0-step2").exists() or not process.is_alive())
    assert (tmp_path / "said").read_text().endswith("\nstep 1\ninjected fault: wait on rank 0 at step 2\n")
    (faults / "wait-rank0-step2.go").touch()
    wait_for(lambda: (faults / "wait-rank0-step3").exists() or not process.is_alive())
    process.terminate()
    assert ended(process) == 77
    assert (tmp_path / "said").read_text().endswith("\nstep 2\ninjected fault: wait on rank 0 at step 3\nstep 3\n")


def test_a_rank_that_was_asked_to_end_before_does_not_wait_and_another_ranks_fault_is_not_its_own(tmp_path):
    """The first as while the fault's file, which is written durably, was on its way to a busy disk."""
    for rank, waits in ((1, False), (0, True)):
        Faults(parse_faults("wait:rank=0,step=1"), rank, tmp_path, print).before_step(1, nn.Linear(2, 2), lambda: True)
        assert (tmp_path / "faults/wait-rank0-step1").exists() == waits


@pytest.mark.parametrize("text, problem", [
    ("explode:rank=0,step=1", "'explode' is no kind"), ("kill:rank=0", "step must be given"),
    ("kill", "rank and step must be given"), ("kill:rank=0,step=x", "step must be a number, not 'x'"),
    ("kill:rank=0,step=1,colour=red", "'colour' is no option"),
    ("nan:rank=0,step=1;kil:rank=0,step=2", "at 'kil:rank=0,step=2'"),
])
def test_a_switch_that_cannot_be_read_names_every_kind(text, problem):
    with pytest.raises(UserError) as caught:
        parse_faults(text)
    assert problem in str(caught.value) and all(f"{kind}: " in str(caught.value) for kind in KINDS)


@pytest.mark.parametrize("kind, status", [("exit", EXIT_STATUS), ("kill", -signal.SIGKILL)])
def test_a_process_ends_once_and_not_again_after_a_restart(tmp_path, start, kind, status):
    fault = f"{kind} on rank 0 at step 3"
    assert ended(start(f"{kind}:rank=0,step=3")) == status
    assert (tmp_path / "said").read_text().splitlines() == [
        f"WARNING: {SWITCH} is set: {fault} will be made to happen", "step 1", "step 2", f"injected fault: {fault}"]
    assert ended(start(f"{kind}:rank=0,step=3")) == 0
    said = (tmp_path / "said").read_text()
    assert "happened before" in said and said.endswith("step 4\n")


def test_a_hanging_process_ignores_all_but_sigkill(tmp_path, start):
    process = start("hang:rank=0,step=2")
    wait_for(lambda: ignores(process.pid, signal.SIGTERM, signal.SIGUSR2) or not process.is_alive())
    process.terminate()
    assert ended(process, 1) is None
    process.kill()
    assert ended(process) == -signal.SIGKILL


def test_a_spoiled_loss_is_spoiled_in_its_step_only_and_once(tmp_path):
    said: list[str] = []
    faults = Faults(parse_faults("nan:rank=1,step=2;spike:rank=1,step=3,factor=50;nan:rank=1,step=5,again=1"), 1,
                    tmp_path, said.append)
    assert [str(faults.loss_factor(step)) for step in (1, 2, 3, 2, 3, 5, 5)] == \
        ["1", "nan", "50.0", "1", "1", "nan", "nan"]
    assert len(said) == 4


@pytest.mark.parametrize("dtype, integers, own", [
    (torch.float32, torch.int32, 22), (torch.float64, torch.int64, 51), (torch.bfloat16, torch.int16, 6)])
def test_exactly_one_bit_of_one_weight_is_flipped(dtype, integers, own):
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)).to(dtype)
    for bit in (None, 0, 8 * dtype.itemsize - 1):
        before = torch.cat([weight.detach().flatten() for weight in model.parameters()])
        assert "0.weight" in flip_bit(model, bit)
        after = torch.cat([weight.detach().flatten() for weight in model.parameters()])
        [changed] = [int(value) % (1 << 8 * dtype.itemsize) for value in before.view(integers) ^ after.view(integers)
                     if value]
        assert changed == 1 << (own if bit is None else bit)
    with pytest.raises(UserError, match=f"bits 0 to {8 * dtype.itemsize - 1}"):
        flip_bit(model, 8 * dtype.itemsize)
    with pytest.raises(UserError, match="no weights"):
        flip_bit(nn.Identity())


def test_a_flip_and_a_wait_happen_in_place(tmp_path):
    model, said = nn.Linear(4, 4), []
    before = model.weight.detach().clone()
    faults = Faults(parse_faults("flip:rank=0,step=2;slow:rank=0,step=2,seconds=0.05"), 0, tmp_path, said.append)
    for step, changed in ((1, 0), (2, 1)):
        faults.before_step(step, model, lambda: False)
        assert int((model.weight != before).sum()) == changed
    assert any("bit 22 of element [2, 0] of weight" in text for text in said)
