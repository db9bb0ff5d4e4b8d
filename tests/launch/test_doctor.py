"""`drover doctor`: what it prints and writes. A real Slurm is in tests/slurm."""

import os

import pytest
import yaml

from drover.launch.doctor import main, profile
from drover.launch.slurm.scheduler import NodeKind, Scheduler
from drover.pipeline.config.loading import load_config
from tests.conftest import REPOSITORY
from tests.refusal import printed, table

GPU = NodeKind("gpu", True, 12, 96, 1031000, 8, "2-00:00:00")


@pytest.fixture
def site(programs, monkeypatch):
    """A site with one partition."""
    monkeypatch.setattr(Scheduler, "node_kinds", lambda self: [GPU])
    monkeypatch.setattr(Scheduler, "site_settings", lambda self: {
        "SLURM_VERSION": "24.11.5", "MaxArraySize": "1001", "JobRequeue": "0",
        "AccountingStorageType": "accounting_storage/slurmdbd"})
    monkeypatch.setenv("PATH", str(programs.folder), prepend=os.pathsep)
    programs.do("sbatch", "exit 1")


def test_what_it_prints_and_the_profile(site, tmp_path, capsys):
    path = tmp_path / "new/mine.yaml"
    assert printed(capsys, main, "--write", path, expect=0).splitlines() == [
        "Slurm 24.11.5, MaxArraySize 1001",
        "partition gpu*: 12 nodes with 96 cores, 1,031,000 MB, 8 GPUs; time limit 2-00:00:00",
        "", f"wrote {path}; use it with --cluster {path}"]
    assert path.read_text() == profile([GPU], requeue=False)
    assert "exists already" in printed(capsys, main, "--write", path, expect=2)


@pytest.mark.parametrize("kinds, expected", table("""
    [[gpu, true, 12, 96, 1031000, 8, 2-00:00:00], [cpu, false, 7, 64, 257000, 0, infinite]] -> {partition: gpu, \
gpus_per_node: 8, cpus: 12, requeue: false, of shard: cpu}
    [[debug, true, 3, 4, 6000, 0, infinite]] -> {partition: debug, gpus_per_node: 0, cpus: 2, of shard: null}
    [[debug, true, 4, 4, 6000, 0, "20:00"]] -> {time: 20}""", *[yaml.safe_load] * 2))
def test_the_profile_is_one_that_the_launcher_takes(tmp_path, kinds, expected):
    path = tmp_path / "mine.yaml"
    path.write_text(profile([NodeKind(*kind) for kind in kinds], requeue=False))
    launch = load_config(REPOSITORY / "configs/demo.yaml", [f"launch.cluster={path}"], check=False).launch
    assert expected.items() <= {**launch.model_dump(), "of shard": launch.shard.partition}.items()


def test_a_machine_without_slurm_is_told_what_to_do(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nowhere")
    assert main([]) == 2 and "Log in to one" in capsys.readouterr().err
