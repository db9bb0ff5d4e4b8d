"""Runs that the tests of several files share, made once a session."""

import pytest

from tests.conftest import write_config
from tests.stages.here import prepare_here, run_here
from tests.stages.small_run import copy_of, make_trained_run
from tests.stages.training import copy_run, reusing, run_train, run_with_faults


def halves(corpus, **fields):
    """The corpus as two sources."""
    files = sorted(map(str, corpus.glob("*.txt")))
    return [{"kind": "files", "name": name, "paths": part, **fields}
            for name, part in (("code", files[::2]), ("more", files[1::2]))]


@pytest.fixture(scope="session")
def two_sources(tmp_path_factory, corpus):
    """Config of a run with token shards of short documents and some longer than a sequence, from two sources."""
    config = write_config(tmp_path_factory.mktemp("two"), corpus, shard={"sources": halves(corpus, separator="\n\n")},
                          train={"mixture": {"code": 1, "more": 2}, "checkpoint": {"every_steps": 2}})
    prepare_here(config)
    return config


@pytest.fixture(scope="session")
def interrupted_once(tmp_path_factory, encoded):
    """Config of two runs of 16 steps: `whole` is done, `mini` was killed in step 11, checkpoints 4 and 8 are there."""
    config = reusing(encoded, tmp_path_factory.mktemp("begun"), train={"steps": 16, "precision": "fp64"})
    run_train(config, "name=whole")
    run_with_faults(config, "kill:rank=0,step=11", "train.checkpoint.background=false", expect=-9)
    return config


@pytest.fixture
def interrupted(tmp_path, interrupted_once):
    """The same for a test alone."""
    return copy_run(interrupted_once, tmp_path)


@pytest.fixture
def run(capsys):
    """Run a stage in this process, with one worker; its standard output and error."""
    def checked(stage, config, *overrides, expect=0):
        status = run_here(stage, config, *overrides, "launch.processes=1")
        output = capsys.readouterr()
        assert status == expect and "Traceback" not in output.err, output.err
        return output
    return checked


@pytest.fixture(scope="session")
def small_run(tmp_path_factory):
    """The configuration of a run with everything up to convert, around a model of random weights."""
    config = make_trained_run(tmp_path_factory.mktemp("small"))
    assert run_here("convert", config) == 0
    return config


@pytest.fixture
def copied(small_run, tmp_path):
    """Config and overrides of another run that is at the same point, before evaluate."""
    return copy_of(small_run, tmp_path)
