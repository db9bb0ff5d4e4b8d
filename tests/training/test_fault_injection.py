"""Faults on purpose: read strictly, announced, and each happening once, to real processes."""

from __future__ import annotations

import signal
from functools import partial

import pytest
import torch
from torch import nn

from pipeline.errors import UserError
from pipeline.training.fault_injection import EXIT_STATUS, KINDS, SWITCH, Fault, Faults, flip_bit, parse_faults


def test_the_switch_is_read_with_all_its_options():
    text = " kill:rank=1,step=5; slow:rank=0, step=3, seconds=0.5 ;;flip:rank=2,step=9,bit=31,again=1"
    assert parse_faults(text) == [
        Fault("kill", 1, 5), Fault("slow", 0, 3, seconds=0.5), Fault("flip", 2, 9, bit=31, again=1)]
    assert parse_faults("") == []


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


class EndError(BaseException):
    """The end of a process, or of a wait that has none."""


@pytest.mark.parametrize("kind, end", [
    ("exit", f"exit {EXIT_STATUS}"), ("kill", rf"kill \d+ {signal.SIGKILL:d}"), ("hang", "sleep 3600"),
    ("wait", "sleep 0.05")])
def test_what_ends_or_holds_up_a_process_does_so_once_in_its_step_on_its_rank(tmp_path, monkeypatch, kind, end):
    def over(*arguments):
        raise EndError(" ".join(map(str, arguments)))
    for module, name in (("sys", "exit"), ("os", "kill"), ("time", "sleep")):
        monkeypatch.setattr(f"pipeline.training.fault_injection.{module}.{name}", partial(over, name))
    ignored, said, fault = set(), [], f"{kind} on rank 0 at step 3"
    monkeypatch.setattr(signal, "signal", lambda number, handler: ignored.add(number))
    monkeypatch.setenv(SWITCH, f"{kind}:rank=0,step=3")

    def steps(rank, asked=False):
        faults = Faults.from_environment(rank, tmp_path, said.append)
        for step in range(1, 5):
            faults.before_step(step, nn.Linear(2, 2), lambda: asked)
    steps(1)
    assert said == [], "another rank's business"
    with pytest.raises(EndError, match=f"^{end}$"):
        steps(0)
    assert said == [f"WARNING: {SWITCH} is set: {fault} will be made to happen", f"injected fault: {fault}"]
    assert {signal.SIGTERM, signal.SIGUSR2} <= ignored or kind != "hang"
    steps(0)
    assert "happened before" in said[2] and len(said) == 3
    if kind == "wait":  # until it is told to go on, or the rank is asked to end
        done = tmp_path / "faults/wait-rank0-step3"
        for asked in (True, False):
            done.unlink()
            if not asked:
                done.with_suffix(".go").touch()
            steps(0, asked)


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
    model, highest = nn.Linear(3, 5, bias=False).to(dtype), 8 * dtype.itemsize - 1
    for bit in (None, 0, highest):
        before = model.weight.detach().clone().view(integers)
        assert "element [2, 1] of weight" in flip_bit(model, bit)
        changed = before ^ model.weight.detach().view(integers)
        assert int(changed[2, 1]) % (1 << highest + 1) == 1 << (own if bit is None else bit)
        assert changed.count_nonzero() == 1
    with pytest.raises(UserError, match=f"bits 0 to {highest}"):
        flip_bit(model, highest + 1)
    with pytest.raises(UserError, match="no weights"):
        flip_bit(nn.Identity())
