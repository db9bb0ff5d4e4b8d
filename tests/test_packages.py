"""Packages of extras: which one brings what, and what is said where one is absent."""

import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from drover.pipeline.config.checks import absent_packages
from drover.pipeline.config.loading import load_config
from drover.pipeline.core import errors as packages
from drover.pipeline.core.errors import UserError
from drover.pipeline.data.filters.base import libraries
from tests.conftest import REPOSITORY, run_python, write_config
from tests.refusal import refused, table

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
DISTRIBUTIONS = {"fasttext": "fasttext-community", "mlflow": "mlflow-skinny"}
MARGIN = {"torch", "transformers", "lm_eval", "submitit", "deepspeed", "torchao", "tensorboard", "webdataset"}
"""What private interfaces are used of."""


def requirements(extra=None):
    """By name, what one extra asks for, or every run."""
    texts = PROJECT["dependencies"] if extra is None else PROJECT["optional-dependencies"][extra]
    return {one.name: one for one in map(Requirement, texts)}


def test_the_table_says_what_the_extras_bring():
    for module, extra in packages.EXTRAS.items():
        assert DISTRIBUTIONS.get(module, module) in requirements(extra)
    assert not set(packages.EXTRAS) & set(requirements())


@pytest.mark.parametrize("extra", [None, *PROJECT["optional-dependencies"]])
def test_requirements_have_bounds_and_a_version_that_the_tests_were_run_with(extra):
    """An upper bound where private interfaces are used."""
    pinned = {canonicalize_name(line.partition("==")[0]) for line in (
        REPOSITORY / "constraints.txt").read_text().splitlines()}
    for name, one in requirements(extra).items():
        bounds = {bound.operator for bound in one.specifier}
        assert name == "drover-lm" or ">=" in bounds, name
        assert name not in MARGIN or "<" in bounds, name
        assert extra in ("wandb", "mlflow") or canonicalize_name(name) in {*pinned, "drover-lm", "setuptools"}, name


@pytest.mark.parametrize(("stage", "setting", "module", "extra"), table("""
    shard -> shard.sources=[{kind: hf, name: a, dataset: b}] -> datasets -> hub
    shard -> shard.filters=[{kind: language, path: x, languages: [en]}] -> fasttext -> clean
    shard -> shard.sources=[{kind: files, name: a, paths: [a/*.html]}] -> resiliparse -> web
    shard -> shard.sources=[{kind: files, name: a, paths: [a.warc.gz]}] -> fastwarc -> web
    shard -> shard.sources=[{kind: files,name: a,paths: [b],html: fields, extractor: trafilatura}] -> trafilatura -> web
    train -> train.log_to=[wandb] -> wandb -> wandb
    train -> parallel.engine=deepspeed -> deepspeed -> deepspeed
    evaluate -> evaluate.tasks=[x] -> lm_eval -> eval"""))
def test_a_stage_says_which_extra_it_lacks(monkeypatch, stage, setting, module, extra):
    config = load_config(REPOSITORY / "configs/demo.yaml", ["train.log_to=[]", setting], check=False)
    find = packages.find_spec
    monkeypatch.setattr(packages, "find_spec", lambda name: None if name == module else find(name))
    [output] = absent_packages(config, stage)
    assert f"needs the package {module}, which is not installed here: `pip install --editable '.[{extra}]'`" in output
    monkeypatch.setattr(packages, "CHECKOUT", False)
    assert f"`pip install 'drover-lm[{extra}]'` installs it. Or" in absent_packages(config, stage)[0]
    assert absent_packages(config, "report") == []


def test_what_drover_knows_nothing_of_is_installed_by_its_name(monkeypatch):
    refused(UserError, "mine needs the package no_such, which is not installed here: `pip install no_such` installs it",
            packages.require, "mine", "no_such")
    packages.require("mine", "json")


HIDE = """
import importlib.machinery, importlib.metadata
find, distribution = importlib.machinery.PathFinder.find_spec, importlib.metadata.distribution
def found(name, *where):
    return None if name.partition(".")[0] in ABSENT else find(name, *where)
def known(name):
    if name in ABSENT:
        raise importlib.metadata.PackageNotFoundError(name)
    return distribution(name)
importlib.machinery.PathFinder.find_spec, importlib.metadata.distribution = staticmethod(found), known
"""
"""Code of `sitecustomize`, after which an interpreter has none of the packages ABSENT."""


@pytest.mark.slow
def test_the_whole_chain_needs_no_extra(tmp_path, corpus):
    absent = {*packages.EXTRAS, *DISTRIBUTIONS.values()}
    (tmp_path / "sitecustomize.py").write_text(f"ABSENT = {absent}\n{HIDE}")
    config = write_config(tmp_path, corpus)

    def ended(setting):
        result = run_python("launch/submit.py", "--stage", "all", "--config", config, "--cluster", "local", setting,
                            check=False, PYTHONPATH=f"{tmp_path}:{REPOSITORY}")
        return result.returncode, result.stdout + result.stderr

    for setting in ("train.log_to=[tensorboard]", "evaluate.tasks=[x]"):
        status, output = ended(setting)
        assert status == 2 and "which is not installed here" in output
    status, output = ended("train.log_to=[]")
    assert status == 0, output


def test_versions_of_libraries_decide_what_filters_do():
    pytest.importorskip("fasttext", reason="of the extra `clean`")
    config = load_config(REPOSITORY / "configs/demo.yaml",
                         ["shard.filters=[{kind: language, path: x, languages: [en]}]"], check=False)
    assert set(libraries(config.shard.filters)) == {"unicode", "fasttext-community"}
