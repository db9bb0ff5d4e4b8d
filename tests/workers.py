"""Run the tests in forked workers: `pytest --workers 5`.

One process collects the tests and imports what they need, once. Then it forks the workers. Each takes a group of tests,
runs it, sends its reports back and takes the next one. The tests of a file are one group, because they share fixtures.
The terminal shows one line for each file, when the file is done.
"""

import gc
import os
import re
import signal
import sys
import time
import traceback
from collections import Counter, defaultdict
from contextlib import suppress
from multiprocessing.connection import Pipe, wait
from pathlib import Path

import pytest
from _pytest.reports import TestReport
from _pytest.runner import runtestprotocol

CLUSTERS = {"test_chain.py": "a", "test_one_job.py": "b", "test_submissions.py": "c"}
"""Files of tests/slurm by the lab that they share. All others share a fourth lab. They mostly wait."""
SPREAD = "tests/stages/"
"""Tests of these files are long. Where a file has no fixture of its own, each test is a group."""
FIXTURE = re.compile(r"""scope=["'](module|class)["']""")
LONG = ("tests/test_fuzz.py", "tests/slurm", "tests/test_readme.py", "tests/test_faults.py", "tests/test_house.py",
        "tests/model/test_loss.py", "tests/tools",
        "tests/launch", "tests/parallel", "tests/stages", "tests/rehearsal", "tests/benchmarks")
"""The longest groups. They start first, so that no worker is alone with a long one at the end. The fuzz forks a process
for each case, so it has to be the first of its worker: forks of a process that has used threads may crash."""


def group_name(nodeid, root):
    """Name of the group of tests that a test belongs to."""
    file = nodeid.partition("::")[0]
    if file.startswith("tests/slurm/"):
        return f"tests/slurm {CLUSTERS.get(Path(file).name, 'd')}"
    alone = file.startswith(SPREAD) and not FIXTURE.search((root / file).read_text(encoding="utf-8"))
    return nodeid if alone else file


class Worker:
    """A forked process that runs groups of tests, as the parent sees it."""

    def __init__(self, number, session, groups, others):
        self.number = number
        self.busy = False
        self.left = []
        """Tests of its group that have not ended."""
        self.pipe, other = Pipe()
        self.pid = os.fork()
        if not self.pid:
            status = 1
            try:
                for worker in (self, *others):  # the parent's ends: a worker sees that the parent is gone
                    worker.pipe.close()
                status = run_groups(number, session, groups, other)
            except BaseException:  # noqa: BLE001 - nobody above could show it
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(status)
        other.close()

    def is_gone(self):
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def end(self):
        """Wait for the end of the process; its exit status."""
        self.pipe.close()
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def run_groups(number, session, groups, pipe):
    """Run the groups whose numbers the parent sends; the exit status of this worker."""
    config = session.config
    # Where this runs in the background or under nohup they are ignored, and what the tests start would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    capture = config.pluginmanager.getplugin("capturemanager")
    if capture is not None and capture._global_capturing is not None:  # its files are shared with the other workers
        capture.stop_global_capturing()
        capture.start_global_capturing()
        capture.suspend_global_capture()
    factory = config._tmp_path_factory
    factory._basetemp = factory.getbasetemp() / f"worker{number}"
    factory._basetemp.mkdir(exist_ok=True)
    config.pluginmanager.register(Reporting(pipe))
    try:
        while (group := pipe.recv()) is not None:
            items = groups[group]
            for item, following in zip(items, [*items[1:], session], strict=True):
                # After the last test of a group `following` is the session: session fixtures are kept.
                config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            pipe.send(None)
    except (EOFError, BrokenPipeError, KeyboardInterrupt):  # the parent was killed, or all are to stop
        return 1
    finally:
        session._setupstate.teardown_exact(None)
    return 0


class Reporting:
    """Plugin of a worker: send what comes of each test to the parent."""

    def __init__(self, pipe):
        self.pipe = pipe

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item, nextitem):
        for report in runtestprotocol(item, log=False, nextitem=nextitem):
            self.pipe.send(item.config.hook.pytest_report_to_serializable(config=item.config, report=report))
        return True


class Parent:
    """Plugin of the process that collects: fork the workers, deal out the groups, report."""

    def __init__(self, config, count):
        self.config, self.count = config, count
        self.start = time.monotonic()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session):
        if session.config.option.collectonly:
            return None
        if session.testsfailed and not session.config.option.continue_on_collection_errors:
            raise session.Interrupted(f"{session.testsfailed} errors during collection")
        self.lines = FileLines(self.config, session.items, self.start)
        by_name = defaultdict(list)
        for item in session.items:
            by_name[group_name(item.nodeid, self.config.rootpath)].append(item)
        self.groups = sorted(by_name.values(), key=lambda group: rank(group[0].nodeid))
        self.waiting = list(range(len(self.groups)))
        self.config._tmp_path_factory.getbasetemp()  # one folder for all workers
        gc.collect()
        gc.freeze()
        self.workers = []
        try:
            for number in range(min(self.count, len(self.groups))):
                self._start_worker(number, session)
            while any(worker.busy for worker in self.workers):
                self._receive(session)
        except BaseException:
            for worker in self.workers:
                os.kill(worker.pid, signal.SIGINT)
            raise
        finally:
            for worker in self.workers:
                with suppress(OSError):
                    worker.pipe.send(None)
            statuses = [worker.end() for worker in self.workers]
        if any(statuses):
            self._fail(session, f"a worker failed after its last test (exit statuses {statuses})")
        return True

    def _fail(self, session, reason):
        """Fail the run for what is no test's fault."""
        session.shouldfail = reason
        raise session.Failed(reason)

    def _receive(self, session):
        """Take what the workers send, or notice that one of them is gone."""
        ready = wait([worker.pipe for worker in self.workers if worker.busy], timeout=1)
        for worker in [worker for worker in self.workers if worker.busy and (worker.pipe in ready or worker.is_gone())]:
            try:
                sent = worker.pipe.recv() if worker.pipe.poll() else self._replace(session, worker)
            except (EOFError, ConnectionResetError):
                sent = self._replace(session, worker)
            if sent is None:
                self._deal(worker)
            elif isinstance(sent, dict):
                self._report(self.config.hook.pytest_report_from_serializable(config=self.config, data=sent))
                if sent["when"] == "teardown":
                    self.lines.end(worker.left.pop(0).nodeid)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)

    def _start_worker(self, number, session):
        worker = Worker(number, session, self.groups, self.workers)
        self.workers.append(worker)
        self._deal(worker)

    def _deal(self, worker):
        """Give a worker the next group that waits."""
        worker.busy = bool(self.waiting)
        if worker.busy:
            group = self.waiting.pop(0)
            worker.left = [*self.groups[group]]
            worker.pipe.send(group)

    def _replace(self, session, worker):
        """Report the test that ended its worker as failed, and give the rest of its group to a new worker."""
        self.workers.remove(worker)
        status = worker.end()
        reason = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        if not worker.left:
            self._fail(session, f"a worker ended after the last test of its group: {reason}")
        test, *rest = worker.left
        self._report(TestReport(test.nodeid, test.location, {}, "failed", f"The worker ended here: {reason}.", "call"))
        self.lines.end(test.nodeid)
        if rest:
            self.groups.append(rest)
            self.waiting.insert(0, len(self.groups) - 1)
        self._start_worker(worker.number, session)
        return "replaced"

    def _report(self, report):
        self.config.hook.pytest_runtest_logreport(report=report)
        self.lines.add(report)

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report):
        """No letter for each test: the terminal has a line for each file."""
        if not isinstance(report, TestReport) or hasattr(report, "wasxfail"):
            return None
        if report.failed:
            return "failed" if report.when == "call" else "error", "", ""
        return ("" if report.when != "call" and report.passed else report.outcome), "", ""


class FileLines:
    """A line on the terminal for each file whose tests are done, and one for each failed test."""

    def __init__(self, config, items, start):
        self.terminal, self.start, self.total, self.done = config.get_terminal_writer(), start, len(items), 0
        self.left = Counter(item.nodeid.partition("::")[0] for item in items)
        self.outcomes = defaultdict(Counter)
        self.seconds = Counter()
        self._write(f"{self.total} tests of {len(self.left)} files")

    def add(self, report):
        file = report.nodeid.partition("::")[0]
        self.seconds[file] += report.duration
        if report.when == "call" or not report.passed:
            self.outcomes[file][report.outcome] += 1
        if report.failed:
            self._write(f"{report.nodeid} failed", red=True)

    def end(self, nodeid):
        """Count a test as done; write the file's line after its last one."""
        file = nodeid.partition("::")[0]
        self.done += 1
        self.left[file] -= 1
        if not self.left[file]:
            counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(self.outcomes[file].items()))
            self._write(f"{file}: {counts} in {self.seconds[file]:.1f} s")

    def _write(self, text, **markup):
        minutes, seconds = divmod(int(time.monotonic() - self.start), 60)
        self.terminal.line(f"[{100 * self.done // max(1, self.total):3d}% {minutes:2d}:{seconds:02d}] {text}", **markup)
        self.terminal.flush()


def rank(nodeid):
    """Place of a group in the order in which they start."""
    return next((place for place, start in enumerate(LONG) if nodeid.startswith(start)), len(LONG))


def pytest_addoption(parser):
    parser.addoption("--workers", type=int, default=0, metavar="N", help="run the tests in N forked processes")


def pytest_configure(config):
    if config.option.workers:
        config.pluginmanager.register(Parent(config, config.option.workers))
