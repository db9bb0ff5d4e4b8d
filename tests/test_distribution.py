"""What a user installs from: the image's recipe, the citation, the count of packages that README tells."""

import re
import shutil
import subprocess

import pytest
import yaml

from tests.conftest import REPOSITORY
from tests.pages import typed
from tests.test_packages import PROJECT


def instructions():
    """Name and rest of each line of the Dockerfile, continued lines joined."""
    text = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", (REPOSITORY / "Dockerfile").read_text(), flags=re.MULTILINE))
    return [(name, " ".join(rest.split())) for line in text.splitlines() if line.strip()
            for name, _, rest in [line.strip().partition(" ")]]


def test_the_image_is_made_of_what_is_there():
    """Each line is read, where there is no builder: files that are copied are those of the repository, what is used
    was copied before, arguments are declared, extras exist."""
    copied, declared = set(), set()
    for name, rest in instructions():
        assert name in ("ARG", "FROM", "RUN", "WORKDIR", "COPY")
        if name == "ARG":
            declared.add(rest.partition("=")[0])
        if name == "COPY":
            *sources, target = rest.split()
            assert target == "./" or sources == [target]
            assert all((REPOSITORY / source).exists() for source in sources)
            copied |= {*sources}
        assert set(re.findall(r"\$\{?([A-Z_]+)", rest)) <= declared
        for needed in re.findall(r"--constraint (\S+)", rest):
            assert needed in copied
        if "--editable" in rest:
            extras = dict(re.findall(r"(EXTRAS)=(\S+)", "\n".join(rest for name, rest in instructions())))["EXTRAS"]
            assert '".[${EXTRAS}]"' in rest and set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
            assert {"pyproject.toml", PROJECT["readme"], *PROJECT["license-files"]} <= copied
    links = {path.name for path in (REPOSITORY / "drover").iterdir() if path.is_symlink()}
    assert {"drover", *links} <= copied


def builds_images():
    """Whether there is docker, and a daemon that answers it."""
    found = shutil.which("docker")
    return found and not subprocess.run([found, "info"], capture_output=True, check=False).returncode


@pytest.mark.slow
@pytest.mark.skipif(not builds_images(), reason="no docker that answers, which builds the image")
def test_the_image_is_built_and_has_the_command():
    subprocess.run(["docker", "build", "--quiet", "--tag", "drover:test", "."], cwd=REPOSITORY, check=True)
    said = subprocess.run(["docker", "run", "--rm", "drover:test", "drover", "presets", "llama3_8b"], check=True,
                          capture_output=True, text=True).stdout
    assert "llama3_8b" in said


def test_the_images_python_is_one_that_is_tested():
    python = dict(re.findall(r"^ARG (PYTHON)=(\S+)", (REPOSITORY / "Dockerfile").read_text(), re.MULTILINE))["PYTHON"]
    assert f"Programming Language :: Python :: {python}" in PROJECT["classifiers"]


def test_nothing_that_is_built_or_run_here_goes_into_an_image():
    ignored = (REPOSITORY / ".dockerignore").read_text().split()
    assert {".git", ".venv", "runs"} <= set(ignored)


def test_the_citation_is_of_this_version():
    cited = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())
    assert (cited["version"], cited["license"]) == (PROJECT["version"], PROJECT["license"])
    assert cited["authors"] == PROJECT["authors"] and cited["cff-version"] == "1.2.0"


def test_make_installs_what_runs_need_and_what_tests_need_apart():
    def installs(target):
        return re.findall(r"pip install .*--editable '\.\[(\S+)\]'", typed(f"make -n -B {target}", REPOSITORY).stdout)
    assert installs("demo") == ["eval,hub,slurm,tensorboard"]
    assert installs("test") == installs("lint") == [*installs("demo"), "dev"]
