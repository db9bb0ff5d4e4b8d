"""Object stores of other clouds for tests, on 127.0.0.1 only: `azurite` and `google`, used like those of
tests/object_store.py.

Azurite is Microsoft's own emulator, which checks signatures; it comes with `npm install --global azurite`, and tests
that need it are left out where it is missing. Requests go to it through a server of this process, which fails on
request.

Nobody offers a server of what Google's store is asked here, its XML API: PyPI's gcp-storage-emulator (2026.7.19)
answers 501 to HEAD, DELETE, listings and uploads in parts, and gives no ETag for what is written. `google` is a
stand-in: moto's S3, whose XML Google's has too, with what is different there by Google's documentation.
"""

import base64
import hashlib
import hmac
import http.client
import itertools
import json
import shutil
import threading
import uuid
from email.utils import formatdate
from urllib.parse import parse_qs, quote

import pytest

from tests.object_store import (
    SECRET,
    Bucket,
    answered,
    answers,
    free_ports,
    hurry,
    moto_s3,
    refuse,
    running,
    served,
    set_environment,
)
from tests.waiting import wait_for

ACCOUNT, AZURE_KEY = "drover", base64.b64encode(SECRET.encode()).decode()
NO_AZURITE = "Azurite, Microsoft's emulator of Azure's object store, is not installed: npm install --global azurite"

MOTOS = "AWS4-HMAC-SHA256 Credential=drover/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
"""What moto wants to see, which compares no signatures."""

OF_NOTHING = "bytes 0--1/0"
"""The range that Azurite (3.35.0) says to send of an empty object, with 206, where Azure answers 416 InvalidRange."""


class Forwarded:
    """A WSGI application whose requests are answered by Azurite at a port of this machine, but for those for a range of
    an empty object, which Azure refuses."""

    def __init__(self, port):
        self._port = port

    def __call__(self, environ, start):
        headers = {name.removeprefix("HTTP_").replace("_", "-"): value for name, value in environ.items()
                   if name.startswith("HTTP_") or name in ("CONTENT_TYPE", "CONTENT_LENGTH")}
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        connection = http.client.HTTPConnection("127.0.0.1", self._port)
        connection.request(environ["REQUEST_METHOD"], environ["REQUEST_URI"], body, headers)
        answer = connection.getresponse()
        data = answer.read()
        connection.close()
        given = {name: value for name, value in answer.getheaders()
                 if name.lower() not in ("connection", "keep-alive", "transfer-encoding", "date")}
        if given.get("content-range") == OF_NOTHING:
            return refuse(start, "416 Range Not Satisfiable", "InvalidRange", "The range specified is invalid.")
        if environ["REQUEST_METHOD"] != "HEAD":
            given = {name: value for name, value in given.items() if name.lower() != "content-length"}
            given["Content-Length"] = str(len(data))
        start(f"{answer.status} {answer.reason}", list(given.items()))
        return [data]


@pytest.fixture(scope="session")
def azurite_server(tmp_path_factory):
    """The address of this worker's own Azurite, with the account's name, behind a server that fails on request."""
    program = shutil.which("azurite-blob")
    if program is None:
        pytest.skip(NO_AZURITE)
    folder, [port] = tmp_path_factory.mktemp("azurite"), free_ports(1)
    command = [program, "--blobPort", str(port), "--inMemoryPersistence", "--disableTelemetry", "--silent"]
    with running(command, folder, AZURITE_ACCOUNTS=f"{ACCOUNT}:{AZURE_KEY}") as process:
        wait_for(lambda: answers(port), lambda: f"Azurite answers; {folder}/log", of=process)
        with served(Forwarded(port)) as (endpoint, server):
            yield f"{endpoint}/{ACCOUNT}", server


@pytest.fixture
def azurite(azurite_server, monkeypatch):
    """A new container on Azurite, and the environment for it, as a user sets it for an address of their own."""
    endpoint, server = azurite_server
    set_environment(monkeypatch, AZURE_STORAGE_ACCOUNT_NAME=ACCOUNT, AZURE_STORAGE_ACCOUNT_KEY=AZURE_KEY,
                 AZURE_STORAGE_ENDPOINT=endpoint)
    hurry(monkeypatch)
    wrong = base64.b64encode(f"wrong-{SECRET}".encode()).decode()
    bucket = Bucket(_make_container(endpoint), endpoint, server, "az", r"^/[^/]*/[^/]*/?$",
                    ("AZURE_STORAGE_ACCOUNT_KEY", wrong), "AZURE_STORAGE_ENDPOINT")
    server.seen.clear()
    yield bucket
    server.faults.clear()


def _make_container(endpoint):
    """A new container's name. The request is signed by hand, which obstore cannot be asked to make."""
    name = f"drover-{uuid.uuid4().hex[:12]}"
    address = endpoint.removeprefix("http://").partition("/")[0]
    own = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    signed = "\n".join(["PUT", *[""] * 11, *(f"{key}:{value}" for key, value in own.items()),
                        f"/{ACCOUNT}/{ACCOUNT}/{name}", "restype:container"])
    signature = base64.b64encode(hmac.digest(base64.b64decode(AZURE_KEY), signed.encode(), hashlib.sha256)).decode()
    connection = http.client.HTTPConnection(address)
    connection.request("PUT", f"/{ACCOUNT}/{name}?restype=container",
                       headers={**own, "Authorization": f"SharedKey {ACCOUNT}:{signature}", "Content-Length": "0"})
    answer = connection.getresponse()
    assert answer.status == 201, answer.read()
    connection.close()
    return name


class GoogleStandIn:
    """Google's XML API as far as it is needed, over moto's S3: tokens that name the account's key are asked for, each
    write has a generation, on which the next may depend, and what is not there cannot be deleted."""

    def __init__(self, storage, key):
        self._storage, self._key = storage, key
        self._generations, self._numbers = {}, itertools.count(1_700_000_000)
        self._lock = threading.Lock()

    def __call__(self, environ, start):
        if not self._knows(environ.get("HTTP_AUTHORIZATION", "")):
            return refuse(start, "401 Unauthorized", "AuthenticationRequired", "Authentication required.")
        environ["HTTP_AUTHORIZATION"] = MOTOS
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        asked = parse_qs(environ["QUERY_STRING"], keep_blank_values=True)
        environ["REQUEST_URI"] = environ["RAW_URI"] = f"{quote(path, encoding='latin-1')}?{environ['QUERY_STRING']}"
        written = (method == "PUT" and "partNumber" not in asked) or (method == "POST" and "uploadId" in asked)
        condition = environ.get("HTTP_X_GOOG_IF_GENERATION_MATCH")
        deleted = method == "DELETE" and "uploadId" not in asked
        with self._lock:
            if condition is not None and int(condition) != self._generations.get(path, 0):
                return refuse(start, "412 Precondition Failed", "PreconditionFailed",
                                "At least one of the pre-conditions you specified did not hold.")
            if deleted and path not in self._generations:
                return refuse(start, "404 Not Found", "NoSuchKey", "The specified key does not exist.")
            status, headers, data = answered(self._storage, environ)
            if status.startswith("2") and written:
                self._generations[path] = next(self._numbers)
            elif status.startswith("2") and deleted:
                del self._generations[path]
            if path in self._generations:
                headers = [*headers, ("x-goog-generation", str(self._generations[path]))]
        start(status, headers)
        return [data]

    def _knows(self, authorization):
        """Whether a token names the account's key; that it is signed by it is left to those who sign."""
        header = authorization.removeprefix("Bearer ").partition(".")[0]
        return bool(header) and json.loads(base64.urlsafe_b64decode(header + "=="))["kid"] == self._key


@pytest.fixture(scope="session")
def google_server(tmp_path_factory):
    """The stand-in's address and server, and two files of keys: its service account's, and one with another key."""
    from cryptography.hazmat.primitives.asymmetric import rsa
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
    folder, files = tmp_path_factory.mktemp("google"), []
    key = rsa.generate_private_key(65537, 2048).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    for name in ("account", "other"):
        files.append(folder / f"{name}.json")
        files[-1].write_text(json.dumps({"type": "service_account", "private_key": key.decode(), "private_key_id": name,
                                         "client_email": "drover@example.com"}))
    with served(GoogleStandIn(moto_s3(), "account")) as (endpoint, server):
        yield endpoint, server, files


@pytest.fixture
def google(google_server, monkeypatch):
    """A new bucket on the stand-in for Google's store, and the environment for it."""
    from werkzeug.test import Client
    endpoint, server, files = google_server
    set_environment(monkeypatch, GOOGLE_APPLICATION_CREDENTIALS=str(files[0]), GOOGLE_BASE_URL=endpoint)
    hurry(monkeypatch)
    name = f"drover-{uuid.uuid4().hex[:12]}"
    assert Client(moto_s3()).put(f"/{name}", base_url="http://127.0.0.1").status_code == 200
    server.seen.clear()
    yield Bucket(name, endpoint, server, "gs", key=("GOOGLE_APPLICATION_CREDENTIALS", str(files[1])),
                 address="GOOGLE_BASE_URL")
    server.faults.clear()
