"""Nobody else could have written what a job executes."""

import os
import shlex
import stat
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from drover.launch.job.host import JobSpec
from drover.launch.job.rank import defaults
from drover.launch.job.task import refuse_changed_files
from drover.launch.slurm.trust import node_folder, owner_problems, private_folder
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import sha256_file, write_text
from tests.refusal import refused

ROOT = os.getuid() == 0
OTHER = 12345


@pytest.fixture(autouse=True)
def usual_node(tmp_path_factory, monkeypatch):
    """A node of the test's own, with the usual umask, whoever runs the tests."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path_factory.mktemp("node")))
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture
def run(tmp_path):
    """A run folder as a submission leaves it."""
    run = tmp_path / "run"
    for path in (run / "code/c/drover/launch/a.py", run / "launch/submitit/1_submission.sh",
                 tmp_path / "plugins/ours.py"):
        write_text(path, f"# {path}\n")
    return run


@pytest.fixture
def spec(run):
    """The spec of a job."""
    plugin = run.parent / "plugins/ours.py"
    spec = JobSpec("trial-train", "train", ("python",), run=str(run), chain="c",
                   files={str(plugin): sha256_file(plugin)})
    refuse_changed_files(spec)
    return spec


EXECUTED = ["..", ".", "code", "launch", "launch/submitit", "code/c", "code/c/drover/launch",
            "code/c/drover/launch/a.py", "../plugins", "../plugins/ours.py"]


@pytest.mark.parametrize("spoil, why", [
    ("chmod o+w", "may be written by everyone"), ("chmod g+w", "may be written by the group "),
    pytest.param(f"chown {OTHER}", f"belongs to the user {OTHER}. Use a run folder of your own",
                 marks=pytest.mark.skipif(not ROOT, reason="only root can give files away"))])
def test_what_others_may_write_or_own_is_refused_with_the_remedy(spec, run, spoil, why):
    for name in EXECUTED:
        path = (run / name).resolve()
        owner = path.stat().st_uid
        subprocess.run([*spoil.split(), path], check=True)
        message = refused(UserError, why, refuse_changed_files, spec)
        assert f"{path} {why}" in message and "set launch.check_owners=false" in message
        if "chmod" in spoil:
            subprocess.run(shlex.split(message.split("`")[1]), check=True)
        else:
            os.chown(path, owner, -1)
        refuse_changed_files(spec)


def test_owners_that_are_not_compared(spec, run):
    run.chmod(0o777)
    refuse_changed_files(replace(spec, check_owners=False))


def test_a_plugin_that_changed_after_the_submission_is_not_run(spec, run):
    plugin = run.parent / "plugins/ours.py"
    plugin.write_text("import evil\n")
    refused(UserError, "ours.py changed after the submission. Nothing was started", refuse_changed_files, spec)
    plugin.unlink()
    refused(UserError, "ours.py changed after the submission", refuse_changed_files, spec)


def test_a_sticky_folder_may_be_above_a_run_but_no_run(spec, run, tmp_path):
    """There nobody exchanges what is another's."""
    tmp_path.chmod(0o777)
    refused(UserError, f"{tmp_path} may be written by everyone", refuse_changed_files, spec)
    tmp_path.chmod(0o1777)
    refuse_changed_files(spec)
    run.chmod(0o1777)
    refused(UserError, f"{run} may be written by everyone", refuse_changed_files, spec)


def test_folders_that_links_lead_through_are_looked_at(tmp_path):
    (tmp_path / "shared").mkdir()
    (tmp_path / "data/run").mkdir(parents=True)
    (tmp_path / "shared/hop").symlink_to("../data")
    (tmp_path / "runs").symlink_to(tmp_path / "shared/hop")
    assert owner_problems([tmp_path / "runs/run"]) == []
    if ROOT:
        (tmp_path / "shared").chmod(0o1777)
        os.chown(tmp_path / "shared/hop", OTHER, -1, follow_symlinks=False)
        message, = owner_problems([tmp_path / "runs/run"])
        assert message.startswith(f"{tmp_path}/shared/hop belongs to the user {OTHER}")
        os.chown(tmp_path / "shared/hop", 0, -1, follow_symlinks=False)
    (tmp_path / "shared").chmod(0o777)
    message, = owner_problems([tmp_path / "runs/run"])
    assert message.startswith(f"{tmp_path}/shared may be written by everyone")
    refused(PermissionError, "shared may be written by everyone", private_folder, tmp_path / "shared/mine")


# ---- at submission


def test_what_is_submitted_is_ones_own_whatever_the_umask_and_the_checkout(slurm):
    os.umask(0o002)
    (slurm.checkout / "launch/slurm/trust.py").chmod(0o666)
    slurm.accepted("--stage all")
    assert not [path for folder in ("code", "logs", "launch") for path in (slurm.run / folder).rglob("*")
                if path.stat().st_mode & 0o022]
    for job in slurm.chain.jobs:
        refuse_changed_files(slurm.task(job.id).spec)


def test_a_run_folder_that_others_may_write_is_refused_at_once(slurm):
    slurm.done("shard")
    slurm.run.chmod(0o777)
    message = slurm.refused("--stage all")
    assert "runs/trial may be written by everyone (mode 0777). Look at it, then `chmod go-w '" in message
    assert not list(slurm.queue.iterdir()) and not (slurm.run / "code").exists()
    slurm.accepted("--stage all launch.check_owners=false")
    subprocess.run(shlex.split(message.split("`")[1]), check=True)
    slurm.accepted("--stage all")


# ---- caches


def test_a_private_folder(tmp_path):
    os.umask(0)
    mine, link = tmp_path / "mine", tmp_path / "link"
    link.symlink_to(mine)
    for _ in ("made", "used"):
        assert private_folder(mine) == mine and stat.S_IMODE(mine.stat().st_mode) == 0o700
        mine.chmod(0o755)
    (tmp_path / "file").touch(0o600)
    refused(FileExistsError, "File exists", private_folder, tmp_path / "file")
    for mode, why in (0o702, "may be written by everyone"), (0o770, "may be written by the group"):
        mine.chmod(mode)
        for path in (link, mine):
            refused(PermissionError, why, private_folder, path)


def test_compilers_keep_what_they_run_again_in_private():
    node = {"LOCAL_RANK": "3", "SLURMD_NODENAME": "n7"}
    assert defaults({**node, "TRITON_CACHE_DIR": "/scratch/a", "TORCHINDUCTOR_CACHE_DIR": "/scratch/b"})
    assert not node_folder().exists(), "the user's own are the user's own affair"
    result = defaults(node)
    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        assert node_folder() in Path(result[name]).parents
    assert stat.S_IMODE(node_folder().stat().st_mode) == 0o700
    node_folder().chmod(0o777)
    refused(UserError, r"may be written by everyone.*\(on n7\)\. Remove it there \(`rm -r .*"
                       r"set TRITON_CACHE_DIR and TORCHINDUCTOR_CACHE_DIR in launch\.environment", defaults, node)
