"""What a job executes is what was submitted, and nobody else could have written it."""

import grp
import json
import os
import pwd
import re
import shutil
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from drover.launch.slurm import trust
from drover.launch.slurm.job.rank import defaults
from drover.launch.slurm.job.srun import srun_command
from drover.launch.slurm.jobspec import JobSpec
from drover.launch.slurm.submit.snapshot import planned_snapshot
from drover.launch.slurm.trust import (
    archive_of,
    check_submission,
    folders_of,
    local_copy,
    node_folder,
    owner_problems,
    private_folder,
)
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import sha256_file
from tests.launch.launcher import snapshot_of
from tests.refusal import refused, table

ROOT, IS_PRIVATE = os.getuid() == 0, trust._is_private
OTHER = 12345


@pytest.fixture(autouse=True)
def usual_node(tmp_path_factory, monkeypatch):
    """A node of the test's own, with the usual umask, whoever runs the tests, where no group is a user's own."""
    monkeypatch.setattr(trust, "_is_private", lambda group: False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path_factory.mktemp("node")))
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture
def checkout(tmp_path):
    folder = tmp_path / "checkout"
    for name in ("launch/a.py", "launch/slurm/b.py", "pipeline/c.py", "launch.py/odd.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"NAME = {name!r}\n")
    return folder


@pytest.fixture
def submitted(checkout, tmp_path):
    """A run folder as a submission leaves it."""
    run = tmp_path / "run"
    code = snapshot_of(run, checkout)
    for folder in folders_of(run):
        folder.mkdir(parents=True, exist_ok=True)
    config = run / "launch/config-1.yaml"
    config.write_text("name: trial")
    spec = JobSpec("trial-train", "train", ("python",), run=str(run), chain="c", code=str(code),
                   code_sha256=planned_snapshot(run, checkout)[1], files={str(config): sha256_file(config)})
    spec.save(run / "launch/jobs/c-train.json")
    return spec


def path_of(spec):
    return Path(spec.run) / "launch/jobs/c-train.json"


def saved(spec, **changes):
    """The spec with changes, in its file."""
    spec = replace(spec, **changes)
    spec.save(path_of(spec))
    return spec


def ended(command, **how):
    """Run a program to its end; its exit status and all that it said."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **how)
    return done.returncode, done.stdout


def check(spec):
    return " ".join(check_submission(path_of(spec), spec.sha256)[1])


EXECUTED = [".", "..", "code", "launch", "launch/jobs", "logs", "logs/slurm", "launch/jobs/c-train.json",
            "launch/config-1.yaml", "CODE", "CODE/drover/launch", "CODE/drover/launch/a.py",
            "CODE/drover/launch/__pycache__", "CODE/drover/launch/__pycache__/a.pyc"]
"""What a job in a container executes: it runs the copy of the code in the run folder."""


def place(spec, name):
    """A path of the run, with a cache as Python makes it."""
    cache = Path(spec.code) / "drover/launch/__pycache__"
    cache.mkdir(exist_ok=True)
    (cache / "a.pyc").write_bytes(b"")
    return Path(spec.run, name.replace("CODE", spec.code)).resolve()


def test_what_was_submitted_is_run(submitted):
    assert check(submitted) == ""
    place(submitted, "")
    assert check(submitted) == check(saved(submitted, contained=True)) == "", "Python's own caches are no change"


@pytest.mark.parametrize("spoil, why", [
    ("chmod o+w", "may be written by everyone"), ("chmod g+w", "may be written by the group "),
    pytest.param(f"chown {OTHER}", f"belongs to the user {OTHER}, and jobs execute files there",
                 marks=pytest.mark.skipif(not ROOT, reason="only root can give files away"))])
def test_what_others_may_write_or_own_is_refused(submitted, spoil, why):
    submitted = saved(submitted, contained=True)
    for name in EXECUTED:
        path = place(submitted, name)
        before = path.stat()
        subprocess.run([*spoil.split(), path], check=True)
        said = check(submitted)
        assert said.startswith(f"{path} {why}") and ("everyone" in why) != ("launch.trusted_group" in said)
        assert "belongs" in why or f"`chmod go-w {path}`" in said
        os.chown(path, before.st_uid, -1)
        path.chmod(before.st_mode)
    assert check(submitted) == ""


def test_a_group_can_be_trusted(submitted):
    trusting = saved(submitted, trusted_group=grp.getgrgid(os.getgid()).gr_name, contained=True)
    for name in EXECUTED:
        path = place(submitted, name)
        path.chmod(path.stat().st_mode | 0o020)
    assert check(trusting) == ""
    assert owner_problems([Path(submitted.run)], "no such group") and owner_problems([Path(submitted.run)], None)
    path.chmod(path.stat().st_mode | 0o002)
    assert "may be written by everyone" in check(trusting), "that is no group"


def test_members_of_a_trusted_group_may_own_parts(submitted, monkeypatch):
    monkeypatch.setattr(trust.os, "getuid", lambda: OTHER)  # somebody else's job; the files are mine
    monkeypatch.setattr(trust, "node_folder", lambda: Path("/proc/nowhere"))
    own = pwd.getpwuid(Path(submitted.run).stat().st_uid)
    if own.pw_uid:
        assert "belongs to" in check(submitted)
    assert check(saved(submitted, trusted_group=grp.getgrgid(own.pw_gid).gr_name)) == ""


def test_a_private_group_is_the_users_own(monkeypatch):
    monkeypatch.setattr(trust.pwd, "getpwuid", lambda number: SimpleNamespace(pw_name="me", pw_gid=7))

    def is_private(number, name, *members):
        monkeypatch.setattr(trust.grp, "getgrgid", lambda number: SimpleNamespace(gr_name=name, gr_mem=members))
        return IS_PRIVATE(number)

    assert is_private(7, "me") and is_private(7, "me", "me")
    assert not is_private(8, "me") and not is_private(7, "physics") and not is_private(7, "me", "me", "you")


def test_owners_need_not_be_looked_at(submitted):
    blind = saved(submitted, check_owners=False, contained=True)
    for folder in folders_of(Path(submitted.run)):
        folder.chmod(0o777)
    assert check(blind) == ""
    (Path(submitted.code) / "drover/launch/a.py").write_text("changed")
    (Path(submitted.code) / "drover/launch/__pycache__").symlink_to("/tmp")
    assert "drover/launch/__pycache__, drover/launch/a.py. " in check(blind), "whoever owns it"


@pytest.mark.parametrize("change, told", table("""
    echo import evil > drover/launch/a.py -> : drover/launch/a.py. Nothing
    echo import evil > sitecustomize.py -> : sitecustomize.py. Nothing
    mkdir submitit && touch submitit/__init__.py -> : submitit/__init__.py. Nothing
    rm drover/launch/a.py -> : drover/launch/a.py. Nothing
    mv drover/launch/a.py drover/launch/z.py -> : drover/launch/a.py, drover/launch/z.py. Nothing
    ln -s ../pipeline/c.py drover/launch/z -> : drover/launch/z. Nothing
    mv drover/launch/a.py .. && ln -s ../../../a.py drover/launch -> : drover/launch/a.py. Nothing
    rm -r $PWD -> drover/launch/a.py
    printf PK > $PWD.zip -> .zip, the copy of the code, changed after the submission
    rm $PWD.zip -> .zip, the copy of the code, changed after the submission or is missing
    sed -i s/python/rm/ ../../launch/jobs/* -> /launch/jobs/c-train.json, the job's spec, changed after the submission
    echo '{' > ../../launch/jobs/c-train.json -> /launch/jobs/c-train.json, the job's spec, cannot be read
    echo > ../../launch/config-1.yaml -> /launch/config-1.yaml changed after the submission. Nothing was started. If \
you changed it, submit the same command again, which takes a new copy. If not, find out who did."""))
def test_what_changed_after_the_submission_is_not_run(submitted, change, told):
    """Owners are not compared here. The job is in a container, which may not see the node's copy."""
    submitted = saved(submitted, contained=True, check_owners=False)
    subprocess.run(["sh", "-ec", change], cwd=submitted.code, check=True)
    assert told in check(submitted) and "submit the same command again" in check(submitted).lower()


@pytest.mark.skipif(not ROOT, reason="only root can be somebody else")
def test_somebody_who_may_write_above_the_run_cannot_exchange_it(submitted, tmp_path):
    """He is refused before; and what a job has started from is on its node, whatever becomes of the run."""
    tmp_path.chmod(0o777)
    assert check(submitted).startswith(f"{tmp_path} may be written by everyone")
    run, blind = Path(submitted.run), saved(submitted, check_owners=False)
    folder, problems = check_submission(path_of(blind), blind.sha256)
    assert not problems and folder.parent == node_folder() and not (folder / "drover/launch/__pycache__").exists()
    subprocess.run(["sh", "-c", "mv run old && cp -r old run && echo evil | tee run/code/*/drover/launch/a.py"],
                   cwd=tmp_path, user=OTHER, group=OTHER, check=True)
    assert (folder / "drover/launch/a.py").read_text() == "NAME = 'launch/a.py'\n"
    tmp_path.chmod(0o1777)
    said = check(saved(submitted))
    assert said.startswith(f"{run}, ") and f"belongs to the user {OTHER}" in said and f"{tmp_path} may" not in said, \
        "in a sticky folder nobody exchanges what is another's"


def test_folders_that_links_lead_through_are_looked_at(tmp_path):
    (tmp_path / "shared").mkdir()
    (tmp_path / "data/run").mkdir(parents=True)
    (tmp_path / "shared/hop").symlink_to("../data")
    (tmp_path / "runs").symlink_to(tmp_path / "shared/hop")
    assert owner_problems([], None, [tmp_path / "runs/run"]) == []
    (tmp_path / "shared").chmod(0o777)
    said, = owner_problems([], None, [tmp_path / "runs/run"])
    assert said.startswith(f"{tmp_path}/shared may be written by everyone")
    refused(PermissionError, "shared may be written by everyone", private_folder, tmp_path / "shared/mine")


def test_a_nodes_copy_is_compared_once_a_step_and_made_again_if_it_is_damaged(submitted, monkeypatch):
    code, content = Path(submitted.code), submitted.code_sha256

    def damaged(step=None):
        """Whether a damaged copy is still that for a task of a step."""
        if step:
            monkeypatch.setenv("SLURM_STEP_ID", step)
        (copy / "drover/launch/a.py").write_text("damaged")
        assert local_copy(code, content) == copy
        return "damaged" in (copy / "drover/launch/a.py").read_text()

    copy = local_copy(code, content)
    assert stat.S_IMODE(copy.parent.stat().st_mode) == 0o700 and (copy / "snapshot.json").exists()
    assert not damaged() and not damaged("0") and damaged(), "the step's first task has compared it"
    assert not damaged("1")
    old, recent = copy.with_name("code-old"), copy.with_name("code-recent")
    for other in (old, recent):
        other.mkdir()
        archive_of(other).touch()
        other.with_suffix(".compared").touch()
    os.utime(old.with_suffix(".compared"), (0, 0))
    archive_of(code).write_bytes(b"PK")  # the node has the archive as well
    shutil.rmtree(copy)
    assert local_copy(code, content).is_dir() and recent.is_dir() and not old.exists() and not archive_of(old).exists()
    archive_of(copy).write_bytes(b"PK")
    monkeypatch.setenv("SLURM_STEP_ID", "2")
    refused(ValueError, "other code", local_copy, code, content)


def test_a_task_becomes_its_command_with_the_nodes_copy(submitted, tmp_path):
    """Without room on the node, with the one in the run folder, as long as that is what was submitted."""
    values = json.dumps({name: vars(submitted)[name] for name in trust.CODE})
    command = [sys.executable, "-I", trust.__file__, "node", values, "sh", "-c", "echo $PYTHONPATH"]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": "/code:/plugins",
                   **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(tmp_path))}

    def run():
        return ended(command, env=environment)

    place = tmp_path / f"drover-{os.getuid()}"
    assert run() == (0, f"{place}/code-{submitted.code_sha256[:16]}:/plugins\n")
    shutil.rmtree(place)
    place.touch()  # no room, or somebody else's
    status, said = run()
    assert status == 0 and f"{submitted.code}:/plugins\n" in said and "cannot be copied to this node" in said
    (Path(submitted.code) / "drover/launch/a.py").write_text("evil")
    assert run()[0] == 2
    place.unlink()
    assert run()[0] == 0, "it comes from the archive"
    shutil.rmtree(place)
    archive_of(Path(submitted.code)).write_bytes(b"PK")
    assert run()[0] == 2


def test_what_looks_at_a_nodes_copy_is_not_taken_from_the_run_folder(submitted, tmp_path):
    step = srun_command(submitted, tmp_path, ["true"])
    before = step[:step.index("node")]
    assert "def local_copy(" in before[-1] and not any(submitted.code in word for word in before)


def test_the_archive_proves_nothing_by_itself(submitted, checkout):
    """Whoever changes the code can change its archive as well; a new submission makes both anew."""
    code, submitted = Path(submitted.code), saved(submitted, contained=True)
    (code / "drover/launch/a.py").write_text("import evil\n")
    shutil.make_archive(str(code), "zip", code)
    assert "changed after the submission or is missing. Nothing was started" in check(submitted)
    assert snapshot_of(Path(submitted.run), checkout) == code
    assert check(submitted) == "" and "evil" not in (code / "drover/launch/a.py").read_text()


def test_a_run_folder_may_be_kept_elsewhere(submitted, tmp_path):
    Path(submitted.run).rename(tmp_path / "elsewhere")
    Path(submitted.run).symlink_to(tmp_path / "elsewhere")
    assert check(submitted) == ""
    (tmp_path / "elsewhere").chmod(0o777)
    assert "may be written by everyone (mode 0777)" in check(submitted)


# ---- the script


def test_the_script_looks_before_it_runs_anything_of_the_run(slurm, tmp_path):
    os.umask(0o002)
    (slurm.checkout / "launch/slurm/trust.py").chmod(0o666)
    slurm.accepted("--stage all")
    loose = [path for folder in ("code", "logs", "launch") for path in (slurm.run / folder).rglob("*")
             if path.stat().st_mode & 0o022]
    assert not loose, "what is submitted is one's own, whatever the umask and the checkout"
    lines = (slurm.queue / "104").read_text().splitlines()
    last = next(number for number, line in enumerate(lines) if " -I " in line)
    script = "\n".join([*lines[last - 2:last + 2], "echo started from $PYTHONPATH"])

    def run():
        return ended(["bash"], input=script, cwd="/",
                     env={"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "104", "TMPDIR": str(tmp_path)})

    code = Path(slurm.chain.code)
    copy = tmp_path / f"drover-{os.getuid()}"
    status, said = run()
    assert status == 0 and re.fullmatch(rf"started from {copy}/code-[0-9a-f]+\n", said)
    (code / "drover/launch/new.py").write_text("evil")
    assert run()[0] == 0 and not list(copy.rglob("new.py")), "this node has what was submitted"
    shutil.rmtree(copy)
    archive_of(code).unlink()
    status, said = run()
    assert status == 1 and "refused: " in said and ".zip, the copy of the code, changed after the submission" in said
    (code / "drover/launch/slurm/trust.py").write_text("raise SystemExit(0)  # all is well\n")
    status, said = run()
    assert status == 1 and "trust.py changed after the submission or is missing" in said and "started" not in said


def test_a_run_folder_that_others_may_write_is_refused_at_once(slurm):
    slurm.done("shard")
    slurm.run.chmod(0o777)
    assert "runs/trial may be written by everyone (mode 0777), and jobs execute files there or below. Look at it, " \
           "then `chmod go-w runs/trial`" in slurm.refused("--stage all")
    assert not list(slurm.queue.iterdir()) and not (slurm.run / "code").exists()
    assert "no such group" in slurm.refused("--stage all launch.trusted_group=nobodys-group")
    slurm.accepted("--stage all launch.check_owners=false")


# ---- caches


def test_a_private_folder(tmp_path):
    os.umask(0)
    mine, link = tmp_path / "mine", tmp_path / "link"
    link.symlink_to(mine)
    for mode in (None, 0o755):  # made, and one that others could read
        if mode:
            mine.chmod(mode)
        assert private_folder(mine) == mine and stat.S_IMODE(mine.stat().st_mode) == 0o700
    (tmp_path / "file").touch(0o600)
    refused(FileExistsError, "File exists", private_folder, tmp_path / "file")
    for mode, owner, why in ((0o702, -1, "may be written by everyone"), (0o770, -1, "may be written by the group"),
                             (0o700, OTHER, f"belongs to the user {OTHER}")):
        if owner == -1 or ROOT:
            mine.chmod(mode)
            for path in (link, mine):
                os.chown(path, owner, -1, follow_symlinks=False)
                refused(PermissionError, why, private_folder, path)


def test_compilers_keep_what_they_run_again_in_private():
    node = {"LOCAL_RANK": "3", "SLURMD_NODENAME": "n7"}
    assert defaults({**node, "TRITON_CACHE_DIR": "/scratch/a", "TORCHINDUCTOR_CACHE_DIR": "/scratch/b"})
    assert not node_folder().exists(), "the user's own are the user's own affair"
    found = defaults(node)
    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        assert node_folder() in Path(found[name]).parents
    assert stat.S_IMODE(node_folder().stat().st_mode) == 0o700
    node_folder().chmod(0o777)
    refused(UserError, r"may be written by everyone.*\(on n7\)\. Remove it there \(`rm -r .*"
                       r"set TRITON_CACHE_DIR and TORCHINDUCTOR_CACHE_DIR in launch\.environment", defaults, node)


def test_the_check_needs_nothing_but_the_standard_library():
    status, said = ended([sys.executable, "-I", "-S", trust.__file__, "check", "/nowhere/a/b/c.json", "0"])
    assert status == 2 and said.startswith("refused: /nowhere/a/b/c.json")
