"""Only torch.compile needs a compiler: DeepSpeed would build one thing at its first start, which nothing uses."""

import re
import sysconfig

import pytest
import torch

from drover.pipeline.config.training import TrainConfig
from drover.pipeline.core.errors import UserError
from drover.pipeline.parallel.blocks import INCLUDES, refuse_without_compiler
from tests.refusal import refused
from tests.stages.training import manifest_of, run_train


@pytest.mark.slow
def test_deepspeed_builds_nothing(fresh, tmp_path):
    (tmp_path / "built").mkdir()
    for name, settings in (("a", ("parallel.zero_stage=2", "parallel.offload=optimizer")),
                           ("b", ("parallel.zero_stage=3", "parallel.offload=params"))):
        run_train(fresh, f"name={name}", "parallel.engine=deepspeed", "train.precision=fp32",
                  "train.micro_batch=8", "train.steps=2", "train.warmup_steps=1", *settings, ranks=2,
                  PATH=str(tmp_path / "empty"), TORCH_EXTENSIONS_DIR=str(tmp_path / "built"))
        assert manifest_of(fresh, name=name).counts["steps"] == 2
    assert not list((tmp_path / "built").iterdir())


@pytest.mark.parametrize(("compile_blocks", "device", "compilers", "absent"), [
    (True, "cpu", ["gcc"], "no g++. Install"), (None, "cuda", ["g++"], "no gcc or clang. Install"),
    (None, "cuda", ["clang"], None), (None, "cpu", [], None)])
def test_compiling_is_refused_where_there_is_nothing_to_compile_with(monkeypatch, tmp_path, compile_blocks, device,
                                                                     compilers, absent):
    for name in compilers:
        (tmp_path / name).touch(0o755)
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    given = TrainConfig(compile=compile_blocks), torch.device(device)
    if absent is None:
        refuse_without_compiler(*given)
    else:
        refused(UserError, re.escape(absent), refuse_without_compiler, *given)


def test_compiling_is_refused_without_the_headers_of_python(monkeypatch, tmp_path):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / name))
    for name in INCLUDES:
        monkeypatch.delenv(name, raising=False)
    refused(UserError, f"this machine has no {tmp_path}/include/Python.h. Install", refuse_without_compiler,
            TrainConfig(compile=True), torch.device("cpu"))
    monkeypatch.setenv("CPATH", "/opt/python/include")
    refuse_without_compiler(TrainConfig(compile=True), torch.device("cpu"))
