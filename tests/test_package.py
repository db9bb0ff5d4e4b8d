"""The package that is installed: one name for all of it, its configurations with it, and nothing taken from where it is
started."""

import shlex
import subprocess
import tarfile
import zipfile

import pytest

from tests.conftest import REPOSITORY, run_python

PARTS = ("drover", "model", "pipeline", "launch", "tools", "configs", "pyproject.toml", "README.md", "LICENSE",
         "MANIFEST.in", "constraints.txt")

ASK = "from drover.pipeline.core.errors import install; print(install('tensorboard'))"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder on Python's path into which a wheel was unpacked that was made of the source archive."""
    folder = tmp_path_factory.mktemp("package")
    (folder / "source").mkdir()
    subprocess.run(["cp", "-a", *PARTS, folder / "source"], cwd=REPOSITORY, check=True)  # links as links
    run_python("-c", "from setuptools import build_meta; build_meta.build_sdist('..')", cwd=folder / "source")
    archive, = folder.glob("drover_lm-*.tar.gz")
    with tarfile.open(archive) as file:
        held = {name.split("/")[1] for name in file.getnames() if "/" in name}
    assert {"drover", "constraints.txt", "LICENSE"} <= held and "tests" not in held
    run_python("-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, archive)
    wheel, = folder.glob("drover_lm-*.whl")
    with zipfile.ZipFile(wheel) as file:
        assert {name.split("/")[0].split("-")[0] for name in file.namelist()} == {"drover", "drover_lm"}
        scripts, = (name for name in file.namelist() if name.endswith("entry_points.txt"))
        assert "drover = drover.__main__:main" in file.read(scripts).decode()
        file.extractall(folder / "site")
    return folder / "site"


def start(site, cwd, *arguments):
    return run_python("-m", *arguments, cwd=cwd, check=False, PYTHONPATH=str(site))


@pytest.mark.slow
def test_an_installed_package_makes_a_run_beside_files_with_the_names_of_its_parts(site, tmp_path):
    for name in ("model.py", "pipeline.py", "launch.py", "tools/__init__.py", "tools/chat.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("raise SystemExit('the wrong module')\n")
    made = start(site, tmp_path, "drover", "run", "--config", "configs/demo.yaml", "--cluster", "local",
                 "tokenizer.kind=byte", "train.steps=2", "train.warmup_steps=1",
                 "evaluate.validation_tokens=2000", "evaluate.tasks=[]")
    assert made.returncode == 0, made.stderr
    assert "all done in" in made.stdout and "runs/demo/report.html" in made.stdout
    assert "llama3_8b" in start(site, tmp_path, "drover", "presets", "llama3_8b").stdout
    assert "trace" in start(site, tmp_path, "drover", "completion", "bash").stdout


@pytest.mark.slow
def test_the_command_that_brings_an_extra_is_right_for_a_checkout_and_for_a_wheel(site, tmp_path):
    for code, folder in ((REPOSITORY, REPOSITORY), (site, tmp_path)):
        printed = run_python("-c", ASK, cwd=folder, PYTHONPATH=str(code))
        pip, *arguments = shlex.split(printed.stdout.split("`")[1])
        tried = start(code, folder, pip, *arguments, "--dry-run", "--no-index", "--no-build-isolation")
        assert tried.returncode == 0, tried.stderr
