"""What a user installs from: the image's recipe, the citation, the count of packages that README tells."""

import re
import shutil
import subprocess

import pytest
import yaml

from tests.conftest import REPOSITORY
from tests.pages import typed
from tests.test_packages import PROJECT

DOCKERFILE = (REPOSITORY / "Dockerfile").read_text()


def test_the_image_is_made_of_what_is_there():
    """Where there is no builder: all that is copied is in the repository, with all that the package links to."""
    copied = {source for line in re.findall(r"^COPY (.*) \S+$", DOCKERFILE, re.MULTILINE) for source in line.split()}
    assert copied and all((REPOSITORY / source).exists() for source in copied)
    links = {path.name for path in (REPOSITORY / "drover").iterdir() if path.is_symlink()}
    assert {"drover", "pyproject.toml", PROJECT["readme"], *PROJECT["license-files"], *links} <= copied
    [extras] = re.findall(r"^ARG EXTRAS=(\S+)", DOCKERFILE, re.MULTILINE)
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
    [python] = re.findall(r"^ARG PYTHON=(\S+)", DOCKERFILE, re.MULTILINE)
    assert f"Programming Language :: Python :: {python}" in PROJECT["classifiers"]
    assert {".git", ".venv", "runs"} <= set((REPOSITORY / ".dockerignore").read_text().split())


def builds_images():
    """Whether there is docker, and a daemon that answers it."""
    result = shutil.which("docker")
    return result and not subprocess.run([result, "info"], capture_output=True, check=False).returncode


@pytest.mark.slow
@pytest.mark.skipif(not builds_images(), reason="no docker that answers, which builds the image")
def test_the_image_is_built_and_has_the_command():
    subprocess.run(["docker", "build", "--quiet", "--tag", "drover:test", "."], cwd=REPOSITORY, check=True)
    output = subprocess.run(["docker", "run", "--rm", "drover:test", "drover", "presets", "llama3_8b"], check=True,
                          capture_output=True, text=True).stdout
    assert "llama3_8b" in output


def test_the_citation_is_of_this_version():
    cited = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())
    for name in ("version", "license", "authors"):
        assert cited[name] == PROJECT[name]


def test_make_installs_what_runs_need_and_what_tests_need_apart():
    def installs(target):
        return re.findall(r"pip install .*--editable '\.\[(\S+)\]'", typed(f"make -n -B {target}", REPOSITORY).stdout)
    assert installs("demo") == ["eval,hub,slurm,tensorboard,web"]
    assert installs("test") == installs("lint") == [*installs("demo"), "dev"]
