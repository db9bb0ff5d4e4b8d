"""How a store is found and entered: URLs, addresses, keys; what is told where that fails."""

import os
import sys

import pytest

from drover.pipeline.core.errors import UserError
from drover.pipeline.storage import clouds
from drover.pipeline.storage.store import Missing, Store, preflight
from tests.object_store import SECRET
from tests.refusal import refused, table

CALLS = (lambda store: list(store.list()), lambda store: store.head("x"), lambda store: store.read("x"),
         lambda store: store.put("x", b"1"), lambda store: store.put("x", b"1", only_new=True),
         lambda store: store.delete(["x"]), preflight)


@pytest.mark.parametrize("url, says", table("""
    hdfs://a/b -> s3://, gs://, az://
    s3:///prefix -> names no bucket
    a/b -> cannot be opened
    file://etc/x -> another machine"""))
def test_urls_that_cannot_be_opened_are_refused_plainly(url, says):
    refused(UserError, says, Store, url)


def test_a_wrong_secret_is_told_with_the_url_and_without_the_secret(checking, monkeypatch):
    store = Store(checking.url)
    store.put("x", b"1")
    name, wrong = checking.key
    monkeypatch.setenv(name, wrong)
    for call in CALLS:
        message = refused(UserError, f"{checking.url}.*refused.*{name}", call, store)
        assert not any(part in message for part in (SECRET, wrong, "\n"))


def test_a_bucket_that_is_not_there_is_named(checking):
    store = Store(f"{checking.scheme}://no-such-bucket/x")
    for call in (CALLS[0], *CALLS[2:5], preflight):
        with pytest.raises(UserError, match=rf"no (bucket|container) {checking.scheme}://no-such-bucket .*"
                                            rf"\({'.*' * (checking.scheme == 'az')}{checking.address}\)") as error:
            call(store)
        assert not isinstance(error.value, Missing)


def test_a_store_that_cannot_be_reached_is_told(failing, monkeypatch):
    monkeypatch.setenv(failing.address, "http://127.0.0.1:1")
    monkeypatch.setattr("drover.pipeline.storage.clouds.RETRIES", 2)
    refused(UserError, rf"{failing.url}.*failed.*can be reached.*{failing.address}", list, Store(failing.url).list())


@pytest.fixture
def nothing_set(monkeypatch):
    for name in [name for name in os.environ if name.startswith(("AWS_", "AZURE_"))]:
        monkeypatch.delenv(name)
    return monkeypatch


def test_keys_are_taken_from_the_files_of_other_programs_also_where_they_are_renewed(nothing_set, tmp_path):
    keys, settings = tmp_path / "credentials", tmp_path / "config"
    nothing_set.setenv("AWS_SHARED_CREDENTIALS_FILE", str(keys))
    nothing_set.setenv("AWS_CONFIG_FILE", str(settings))
    settings.write_text("[profile mine]\nregion = us-east-7\n")

    def keys_of(version, profile):
        """What is taken of the file's next version, whose time does not depend on how fine the disk's times are."""
        keys.write_text("".join(f"[{name}]\naws_access_key_id={name}-{version}\naws_secret_access_key = x\n"
                                for name in ("default", "mine")))
        os.utime(keys, ns=(version, version))
        nothing_set.setenv("AWS_PROFILE", profile)
        assert clouds.client("s3://bucket") is clouds.client("s3://bucket")
        provider = clouds.client("s3://bucket").credential_provider
        return [provider()[name] for name in ("access_key_id", "secret_access_key")], provider.config.get("region")
    assert keys_of(1, "mine") == (["mine-1", "x"], "us-east-7") and keys_of(2, "default") == (["default-2", "x"], None)
    refused(UserError, r"s3://bucket cannot be opened: .*\(absent\)", keys_of, 3, "absent")


def test_keys_that_have_expired_are_told_as_such(moto_server):
    store = Store(moto_server.url)
    store.put("x", b"1")
    moto_server.fail("expired", times=10_000)
    for call in CALLS:
        refused(UserError, f"{moto_server.url}.*refused.*AWS_SESSION_TOKEN.*renew keys that have expired", call, store)


def test_without_obstore_it_is_told_what_to_install(monkeypatch, tmp_path):
    clouds._opened.cache_clear()
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    refused(UserError, r"pip install --editable '\.\[objects\]'", list, Store("s3://bucket/x").list())
    folder = Store(f"file://{tmp_path}")
    folder.put("a/b", b"1")
    assert folder.read("a/b") == b"1"
