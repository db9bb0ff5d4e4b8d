"""Clouds' object stores through obstore: clients from the environment, and errors that the user can act on.

obstore repeats a request that fails on the way, or is answered with 5xx or "slow down", and waits longer each time. A
body that breaks off is continued from there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

from drover.pipeline.core.errors import UserError, require, without_secrets
from drover.pipeline.storage.folders import Changed, Exists, Missing, StoredObject

RETRIES = 8
"""Retries of a request, after FIRST_WAIT_S, about twice that ..., at most LONGEST_WAIT_S."""
FIRST_WAIT_S, LONGEST_WAIT_S = 0.2, 15.0
RETRY_S = 180.0
"""No request is repeated this many seconds after the first attempt."""
REQUEST_S = 120.0
"""A request that takes longer, with its body, counts as failed. So nothing large is requested at once."""
PART_BYTES = 8 << 20
"""Larger objects are uploaded in parts of this size, or of a MOST_PARTS-th of the object."""
MOST_PARTS = 10_000
PARTS_AT_ONCE = 4
_FAMILIES = ("AWS_", "GOOGLE_", "AZURE_")
_AWS_KEYS_LAST = timedelta(minutes=10)
"""At least so long: boto3 renews temporary keys before. obstore asks for them again 5 minutes before their end."""
_AWS_FILES = (("AWS_CONFIG_FILE", "config"), ("AWS_SHARED_CREDENTIALS_FILE", "credentials"))
"""Variables with the paths of AWS's files, and their default names in ~/.aws."""
_ADVICE = {
    "s3": "the keys and the address in AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_ENDPOINT_URL, "
          "and the AWS_SESSION_TOKEN of temporary keys, which expire",
    "gs": "the file of the account's key that GOOGLE_APPLICATION_CREDENTIALS names",
    "az": "the account in AZURE_STORAGE_ACCOUNT_NAME and its key in AZURE_STORAGE_ACCOUNT_KEY (or "
          "AZURE_STORAGE_SAS_TOKEN)",
    "web": "the address (web servers are sent no name, password or key)"}
_ADDRESS = {"s3": "AWS_ENDPOINT_URL", "gs": "GOOGLE_BASE_URL",
            "az": "AZURE_STORAGE_ACCOUNT_NAME, AZURE_STORAGE_ENDPOINT", "web": "the URL"}
"""What has a store's address: variables, if it is not the cloud's default."""
_NO_BUCKET = re.compile(r"NoSuchBucket|BucketNotFound|ContainerNotFound|container does not exist")
_REFUSED = re.compile(r"401 Unauthorized|403 Forbidden|400 Bad Request(?!: *\S)|privileges|(?i:credential)|ExpiredToken"
                      r"|//(169\.254\.169\.254|metadata\.google\.internal)/")
"""S3 answers 400 to expired keys, and to HEAD without saying why. The addresses are those where a cloud's machines get
keys of their own if the environment has none."""
_PATHS = re.compile(r"(//[^/\s]+/)\S*")
"""Paths in URLs. A bucket or an object may be called 403, or credentials."""


class Cloud:
    """A bucket (or container), as a backend of `drover.pipeline.storage.store.Store`: keys are full names."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._client = client(root)
        self._kind = _kind(root)

    def list(self, prefix: str) -> list[StoredObject]:
        """All objects below a prefix that ends with a /; "" for all."""
        import obstore
        with self._explained(prefix, "list"):
            return [self._entry(about) for page in obstore.list(self._client, prefix or None, chunk_size=1000)
                    for about in page]

    def head(self, key: str) -> StoredObject | None:
        """One object."""
        import obstore
        try:
            with self._explained(key, "look at"):
                return self._entry(obstore.head(self._client, key))
        except Missing:
            return None

    def read(self, key: str, start: int, stop: int | None, etag: str) -> tuple[bytes, StoredObject]:
        """The bytes [start, stop) as far as they exist, and the object's entry."""
        try:  # always request a range: only then does the answer have the size of the whole object
            return self._range(key, start, (start, stop) if stop is not None else {"offset": start}, etag)
        except _BeyondError:
            if start == 0 and stop is None and (entry := self.head(key)) is not None and entry.size == 0:
                return b"", entry  # an empty object has no ranges
            raise

    def _range(self, key: str, start: int, span: Any, etag: str) -> tuple[bytes, StoredObject]:
        import obstore
        with self._explained(key, "read"):
            options: Any = {"range": span}
            if etag and not etag.startswith("W/"):  # a weak one never matches
                options["if_match"] = etag
            answer = obstore.get(self._client, key, options=options)
            entry = self._entry(answer.meta)
            if answer.range[0] != start:
                raise UserError(f"{self._root}/{key}: asked for the bytes from {start:,} on, the server sent those "
                                f"from {answer.range[0]:,} on. It does not support ranges; use another server.")
            return bytes(answer.bytes()), entry

    def put(self, key: str, data: bytes | Path, only_new: bool) -> str:
        """Write an object; its ETag, if the answer has one."""
        import obstore
        size = data.stat().st_size if isinstance(data, Path) else len(data)
        chunk = max(PART_BYTES, -(-size // MOST_PARTS))
        with self._explained(key, "write"):
            done = obstore.put(self._client, key, data, mode="create" if only_new else None, chunk_size=chunk,
                               max_concurrency=PARTS_AT_ONCE, use_multipart=size > chunk and not only_new)
            return done["e_tag"] or ""

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects; a missing one is no error."""
        import obstore
        try:
            with self._explained(keys[0] if len(keys) == 1 else "", "delete"):
                obstore.delete(self._client, list(keys))
        except Missing:
            for key in keys if len(keys) > 1 else ():
                self.delete([key])

    def _entry(self, about: Any) -> StoredObject:
        """An object's entry from obstore. Azure lists ETags without the quotation marks that they have elsewhere."""
        etag = about["e_tag"] or ""
        if self._kind == "az" and etag and not etag.endswith('"'):
            etag = f'"{etag}"'
        return StoredObject(about["path"], about["size"], etag, about["last_modified"].timestamp())

    @contextmanager
    def _explained(self, key: str, operation: str) -> Iterator[None]:
        """Turn errors into UserError, without the environment's secrets."""
        from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
        url = f"{self._root}/{key}"
        try:
            yield
        except AlreadyExistsError:
            raise Exists(f"{url} is there already.") from None
        except PreconditionError:
            raise Changed(f"{url} has changed: another process wrote it.") from None
        except (BaseError, OSError, ValueError, NotImplementedError) as error:
            raise self._failed(url, operation, error) from None

    def _failed(self, url: str, operation: str, error: Exception) -> UserError:
        text = str(error)
        if _NO_BUCKET.search(text):
            bucket = "container" if self._kind == "az" else "bucket"
            return UserError(f"There is no {bucket} {self._root} at this store. Correct the URL, make the {bucket}, or "
                             f"set the store's address ({_ADDRESS[self._kind]}).")
        if isinstance(error, FileNotFoundError):
            return Missing(f"{url} is not there. Correct the URL, or put the object there.")
        reason = plainly(text)
        text = _PATHS.sub(r"\1", text)
        if "Range request not supported" in text or "Content-Length Header missing" in text:
            return UserError(f"{url}: the server does not send parts of files, or does not say how long they are "
                             f"({reason}). Download the file, and give its path.")
        advice = _ADVICE[self._kind]
        if _REFUSED.search(text):
            return UserError(f"{url}: {operation} was refused: {reason}. Set or correct {advice}; renew keys that have "
                             f"expired, or give them the permission. Then give the same command again.")
        if "ConditionalRequestConflict" in text:
            return Changed(f"{url} is being written by another process.")
        kind = _BeyondError if re.search("416 Range Not Satisfiable|InvalidRange|Wanted range", text) else UserError
        return kind(f"{url}: {operation} failed: {reason}. Check that the store works and can be reached from this "
                    f"machine (its address is set by {_ADDRESS[self._kind]}), and run it again.")


class _BeyondError(UserError):
    """A range starts after the object's end."""


def _kind(root: str) -> str:
    """The cloud of a URL: s3, gs or az, which has several schemes; web for a web server."""
    scheme = root.partition(":")[0]
    return "az" if scheme.startswith("abfs") else "web" if scheme.startswith("http") else scheme


def client(root: str) -> Any:
    """obstore's client of a bucket, from the present environment and AWS's files; one for all callers in this process.

    Raises:
        UserError: obstore is not installed, or the environment's configuration is invalid.
    """
    settings = tuple(sorted((name, value) for name, value in os.environ.items() if name.startswith(_FAMILIES)))
    written = _written(dict(settings)) if root.startswith("s3:") else ()
    return _opened(root, settings, written, os.getpid())


@lru_cache(maxsize=32)
def _opened(root: str, settings: tuple[tuple[str, str], ...], written: tuple[tuple[str, int, int], ...], process: int
            ) -> Any:
    require(root, "obstore")
    import obstore.store

    plain = root.startswith("http:") or any(
        re.search("ENDPOINT|BASE_URL", name) and value.startswith("http://") for name, value in settings)
    try:
        return obstore.store.from_url(
            root, **(_shared_credentials(dict(settings)) if root.startswith("s3:") else {}),
            client_options={"timeout": timedelta(seconds=REQUEST_S), **({"allow_http": True} if plain else {})},
            retry_config={"max_retries": RETRIES, "retry_timeout": timedelta(seconds=RETRY_S),
                          "backoff": {"init_backoff": timedelta(seconds=FIRST_WAIT_S),
                                      "max_backoff": timedelta(seconds=LONGEST_WAIT_S), "base": 2}})
    except (obstore.exceptions.BaseError, ValueError) as error:
        raise UserError(f"{root} cannot be opened: {plainly(str(error))}. Correct the URL, or "
                        f"{_ADVICE[_kind(root)]}.") from None


def _written(settings: dict[str, str]) -> tuple[tuple[str, int, int], ...]:
    """Those of AWS's files that are there, their times and sizes: the keys in them may be renewed during a run."""
    result = []
    for variable, usual in _AWS_FILES:
        file = os.path.expanduser(settings.get(variable, f"~/.aws/{usual}"))  # noqa: PTH111 - may have no home folder
        with suppress(OSError):
            about = Path(file).stat()
            result.append((file, about.st_mtime_ns, about.st_size))
    return tuple(result)


def _shared_credentials(settings: dict[str, str]) -> Any:
    """Keys from where boto3 finds them, AWS's own files first, if the environment has none: obstore reads no files."""
    if settings.keys() & {"AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
                          "AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_SKIP_SIGNATURE"}:
        return {}
    import boto3
    from botocore.exceptions import BotoCoreError
    from obstore.auth.boto3 import Boto3CredentialProvider
    try:
        session = boto3.Session()
        return {"credential_provider": Boto3CredentialProvider(session, ttl=_AWS_KEYS_LAST)} \
            if session.get_credentials() else {}
    except BotoCoreError as error:
        raise ValueError(str(error)) from None


def plainly(text: str) -> str:
    """A library's message as one short line, without the environment's secrets."""
    text = without_secrets(text).partition("\n\nDebug source")[0]
    code = re.search(r"<Code>([^<]*)</Code>", text)
    message = re.search(r"<Message>([^<]*)</Message>", text)
    text = re.sub(r"<\?xml.*|<Error>.*|<html.*", "", text, flags=re.DOTALL | re.IGNORECASE)
    text = re.sub(r"\?[^\s]*(sig|Signature|token)=[^\s]*", "?***", text)
    text_and_codes = " ".join([text, *(result[1] for result in (code, message) if result)])
    return " ".join(text_and_codes.split()).rstrip(".: ")[:600]
