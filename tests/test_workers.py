"""The forked workers report what each test did, keep groups together, and survive a test that kills its process."""

import re

from tests.conftest import run_python

SHARED = """
import os
import pytest

@pytest.fixture(scope="session")
def session():
    yield os.getpid()
    open(f"ended-{os.getpid()}", "w").close()

@pytest.fixture(scope="module")
def module(session):
    return [session]
"""
FILES = {
    "test_a.py": """
import os, signal, sys
def test_before(module): print("printed", "by a")
def test_fails(module): print("seen in the report"); assert module == 1
def test_dies(module): os.kill(os.getpid(), signal.SIGKILL)
def test_after(module, tmp_path): assert module == [os.getpid()]
def test_leaves(module): os._exit(3)
""",
    "test_b.py": """
import os, pytest
def test_one(module): module.append(1)
def test_two(module): assert module == [os.getpid(), 1]
@pytest.mark.skip(reason="left out here")
def test_three(): pass
@pytest.fixture
def broken(): yield; raise OSError("while cleaning up")
def test_four(broken): pass
""",
    "test_c.py": "def test_one(session): pass\n",
}


def run(folder, workers, *options):
    """The tests in a folder, run to their end."""
    return run_python("-m", "pytest", "-p", "tests.workers", "--workers", workers, "-p", "no:cacheprovider", *options,
                      cwd=folder, check=False)


def test_every_test_is_reported_once_and_a_killed_worker_is_replaced(tmp_path):
    (tmp_path / "conftest.py").write_text(SHARED)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    answer = run(tmp_path, "2", "-ra", f"--basetemp={tmp_path}/base", f"--junitxml={tmp_path}/report.xml")
    shown = answer.stdout
    assert answer.returncode == 1, shown + answer.stderr
    assert "3 failed, 6 passed, 1 skipped, 1 error" in shown and "left out here" in shown
    assert "The worker ended here: SIGKILL." in shown and "The worker ended here: exit status 3." in shown
    assert "seen in the report" in shown and "while cleaning up" in shown and "printed by a" not in shown
    for file, counts in (("test_a.py", "3 failed, 2 passed"), ("test_b.py", "1 failed, 3 passed, 1 skipped"),
                         ("test_c.py", "1 passed")):
        assert len(re.findall(rf"^\[ *\d+% +\d+:\d\d\] {file}: {counts} in ", shown, re.MULTILINE)) == 1, shown
    report = (tmp_path / "report.xml").read_text()
    assert 'tests="10"' in report and 'failures="3"' in report and report.count("<testcase ") == 10
    assert list(tmp_path.glob("ended-*")), "a worker that lived took down its session fixture"


def test_a_worker_that_fails_after_its_last_test_fails_the_run(tmp_path):
    (tmp_path / "test_a.py").write_text("import pytest\n@pytest.fixture(scope='session')\ndef bad():\n    yield\n"
                                        "    raise OSError('at the end')\ndef test_one(bad): pass\n")
    answer = run(tmp_path, "1")
    assert answer.returncode == 1 and "at the end" in answer.stdout + answer.stderr, answer.stdout + answer.stderr
    assert "a worker failed after its last test" in answer.stdout
