"""Processes of a stage that start in hundredths of a second: forked from one that has imported everything already.

Importing torch and what trains on it costs two to four seconds, and the tests start some hundreds of ranks. One
server a test session (`python -m tests.warm`) pays for it once. For every request it forks a child, which becomes what
`python -m pipeline.<stage>` would be: arguments, environment, working directory and streams of its own, a pid that may
be signalled and killed, an exit status. With several ranks the child is an elastic agent in small: it forks the ranks,
gives them what torchrun gives, ends all when one fails, and passes a request to stop on.

What such a process does not show, and is therefore started cold somewhere in the suite: torch's own agent and the
launcher, variables that libraries read while they are imported (OMP_NUM_THREADS among them), and a hash seed of
each process's own. A launcher's stages become such processes where `stand_in` is what it starts (tests/pages.py); they
do not show what they inherit from the launcher, nor that they end when it does or is killed.

The server has one thread and never computes: a fork takes along no lock that somebody holds and no pool of threads.
"""

import atexit
import ctypes
import gc
import importlib
import json
import os
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
IMPORTED = ("torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch._dynamo", "torch.utils.tensorboard",
            "numpy.ma", "sentencepiece", "drover.pipeline.training.set_up", "tests.faulty",
            "drover.pipeline.training.watchdog",
            "drover.pipeline.training.engine")
"""What every child finds imported."""
MORE = {"convert": ("transformers.models.llama.modeling_llama", "transformers.models.auto.tokenization_auto"),
        "deepspeed": ("deepspeed", "drover.pipeline.training.zero")}
"""What some children need besides: imported when the first of them is asked for."""
SHUTDOWN_S = 600
"""How long ranks may take to save and end, as Drover's launcher has it."""
MESSAGE = 1 << 20
PR_SET_NAME = 15


class WarmProcess:
    """A running child of the server, used like `subprocess.Popen`; its output is kept in files."""

    def __init__(self, address, arguments, environment, **options):
        self.args, self.returncode = arguments, None
        self._files = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with self
        self._connection = _ask(address, arguments, environment, REPOSITORY, [file.fileno() for file in self._files],
                                **options)
        self.pid = int(self._answer(None))

    def poll(self):
        """The exit status, negative for a signal; None while the process runs."""
        if self.returncode is None and select.select([self._connection], [], [], 0)[0]:
            self.returncode = int(self._answer(None))
        return self.returncode

    def wait(self, timeout=None):
        if self.returncode is None:
            self.returncode = int(self._answer(timeout))
        return self.returncode

    def communicate(self, timeout=None):
        """Wait for the end; all that was printed."""
        self.wait(timeout)
        return self._said(self._files[0]), self._said(self._files[1])

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def printed(self):
        """What it has printed so far, read without moving the place where it writes."""
        file = self._files[0].fileno()
        return os.pread(file, os.fstat(file).st_size, 0).decode()

    @staticmethod
    def _said(file):
        file.seek(0)
        return file.read()

    def _answer(self, timeout):
        if not select.select([self._connection], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        answer = self._connection.recv(64)
        assert answer, "the server of warm processes has ended"
        return answer


def _ask(address, arguments, environment, directory, files, **options):
    """Ask the server for a process; a connection that tells its pid and then its exit status."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(address)
    request = {"arguments": arguments, "environment": environment, "directory": str(directory), "ranks": 1,
               "limits": {}, **options}
    socket.send_fds(connection, [json.dumps(request).encode()], files)
    return connection


def stand_in(address, arguments):
    """Be `python -m <module>` for whoever started this process, by a warm one: its streams, its end, its requests to
    stop."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # until there is somebody to pass it on to
    connection = _ask(address, arguments, dict(os.environ), Path.cwd(), [1, 2])
    pid = int(connection.recv(64))

    def pass_on(number, _):
        with suppress(ProcessLookupError):  # it may just have ended
            os.kill(pid, number)
    signal.signal(signal.SIGTERM, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    status = int(connection.recv(64))
    return status if status >= 0 else 128 - status


class WarmServer:
    """The process that forks them, as the tests see it. It ends with the session that started it."""

    def __init__(self, environment):
        self._folder = tempfile.TemporaryDirectory(prefix="warm-")
        self.address = f"{self._folder.name}/socket"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(self.address)
        self._listener.listen(64)
        held, self._held = os.pipe()  # whose other end closes with this process, however it ends
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.warm", str(self._listener.fileno()), str(held)], cwd=REPOSITORY,
            env=environment, stdin=subprocess.DEVNULL, pass_fds=(self._listener.fileno(), held))
        os.close(held)

    def start(self, arguments, environment, *, ranks=1, limits=None, limited=None):
        """Start `python -m <arguments>` with exactly this environment, as one process or as ranks.

        limits: soft limits, by their number in the module `resource`; limited: the ranks that have them, all if None.
        """
        return WarmProcess(self.address, list(arguments), environment, ranks=ranks, limits=limits or {},
                           limited=list(range(ranks) if limited is None else limited))

    def close(self):
        os.close(self._held)
        self._process.wait()
        self._listener.close()
        self._folder.cleanup()


def serve(listener, held):
    """Fork a child for every connection, and tell it the child's pid and then its exit status."""
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    told, tell = os.pipe()
    os.set_blocking(tell, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(tell)
    running = {}
    while True:
        ready, _, _ = select.select([listener, held, told], [], [])
        if held in ready:
            return
        if told in ready:
            os.read(told, 4096)
            _tell_ends(running)
        if listener in ready:
            connection, _ = listener.accept()
            content, files, _, _ = socket.recv_fds(connection, MESSAGE, 2)
            request = json.loads(content)
            _import_more(request["arguments"])
            pid = os.fork()
            if not pid:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for stream, file in enumerate(files, 1):
                    os.dup2(file, stream)
                for opened in (listener, connection, *running.values()):
                    opened.close()
                for descriptor in (held, told, tell, *files):
                    os.close(descriptor)
                _become(request)
            running[pid] = connection
            with suppress(OSError):  # whoever asked may have ended meanwhile
                connection.send(str(pid).encode())
            for file in files:
                os.close(file)


def _tell_ends(running):
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        with running.pop(pid) as connection, suppress(OSError):  # nobody may care any more
            connection.send(str(os.waitstatus_to_exitcode(status)).encode())


def _import_more(arguments):
    for word, names in MORE.items():
        if any(argument.endswith((f"drover.pipeline.{word}", f"engine={word}")) for argument in arguments):
            for name in names:
                importlib.import_module(name)


def _become(request):
    """Be the process that was asked for; does not return."""
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    if request["ranks"] == 1:
        _end_with(lambda: _run(request["arguments"], request["limits"]))
    _end_with(lambda: _run_ranks(request))


def _end_with(run):
    """End this process as the interpreter would after `run()`: its exit status, its words, its threads."""
    status = 1
    try:
        run()
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 - as the interpreter itself does
        traceback.print_exc()
    finally:
        with suppress(BaseException):
            threading._shutdown()
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _run(arguments, limits):
    for number, limit in limits.items():
        resource.setrlimit(int(number), (limit, resource.getrlimit(int(number))[1]))
    module, *sys.argv[1:] = arguments
    sys.modules.pop(module, None)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _run_ranks(request):
    """The elastic agent: one process for each rank, all ended when one of them fails."""
    import torch.distributed as dist

    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    processes = [_fork_rank(request, rank, port, listener) for rank in range(request["ranks"])]
    asked = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: asked.append(number))
    # Only now: the store has threads. The ranks wait in the queue of the port until it answers.
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    running, failed, until = set(processes), False, float("inf")
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        running.discard(pid)
        failed = failed or bool(pid and status)
        if (failed or asked) and until == float("inf"):
            until = time.monotonic() + SHUTDOWN_S
            _signal(running, signal.SIGTERM)
        if time.monotonic() > until:
            _signal(running, signal.SIGKILL)
        if not pid:
            time.sleep(0.005)
    del store
    sys.exit(int(failed or bool(asked)))


def _fork_rank(request, rank, port, listener):
    pid, ranks = os.fork(), request["ranks"]
    if pid:
        return pid
    listener.close()
    ctypes.CDLL(None).prctl(PR_SET_NAME, f"rank{rank}".encode())
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks), GROUP_RANK="0",
        GROUP_WORLD_SIZE="1", ROLE_NAME="default", ROLE_RANK=str(rank), ROLE_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RESTART_COUNT="0",
        TORCHELASTIC_MAX_RESTARTS="0", TORCHELASTIC_RUN_ID="warm", TORCHELASTIC_USE_AGENT_STORE="True")
    _end_with(lambda: _run(request["arguments"], request["limits"] if rank in request["limited"] else {}))
    raise AssertionError("not reached")


def _signal(processes, number):
    for pid in processes:
        os.kill(pid, number)  # not yet waited for, so still itself


if __name__ == "__main__":
    if sys.argv[2] == "-m":
        sys.exit(stand_in(sys.argv[1], sys.argv[3:]))
    serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
