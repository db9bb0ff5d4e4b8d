"""How a store is found and entered: URLs, addresses, keys; what is told where that fails."""

import os
import re
import sys
from types import SimpleNamespace

import pytest

from pipeline.errors import UserError
from pipeline.stores import clouds
from pipeline.stores.store import Missing, Store, preflight
from tests.object_store import SECRET


@pytest.mark.parametrize("url, says", [
    ("hdfs://a/b", "s3://, gs://, az://"), ("s3:///prefix", "names no bucket"), ("a/b", "cannot be opened"),
    ("file://etc/x", "another machine")])
def test_urls_that_cannot_be_opened_are_refused_plainly(url, says):
    with pytest.raises(UserError, match=says):
        Store(url)


@pytest.mark.parametrize("call", [lambda store: list(store.list()), lambda store: store.head("x"),
                                  lambda store: store.read("x"), lambda store: store.put("x", b"1"),
                                  lambda store: store.delete(["x"]), preflight], ids=range(6))
def test_a_wrong_secret_is_told_with_the_url_and_without_the_secret(checking, monkeypatch, call):
    store = Store(checking.url)
    store.put("x", b"1")
    name, wrong = checking.key
    monkeypatch.setenv(name, wrong)
    with pytest.raises(UserError, match=f"{checking.url}.*refused.*{name}") as error:
        call(store)
    assert SECRET not in str(error.value) and wrong not in str(error.value) and "\n" not in str(error.value)


def test_a_bucket_that_is_not_there_is_named(checking):
    store = Store(f"{checking.scheme}://no-such-bucket/x")
    for call in (lambda: list(store.list()), lambda: store.put("a", b"1"), lambda: store.read("a"),
                 lambda: store.put("a", b"1", only_new=True), lambda: preflight(store)):
        with pytest.raises(UserError, match=rf"no (bucket|container) {checking.scheme}://no-such-bucket .*"
                                            rf"\({'.*' * (checking.scheme == 'az')}{checking.address}\)") as error:
            call()
        assert not isinstance(error.value, Missing)


def test_a_store_that_cannot_be_reached_is_told(failing, monkeypatch):
    monkeypatch.setenv(failing.address, "http://127.0.0.1:1")
    monkeypatch.setattr("pipeline.stores.clouds.RETRIES", 2)
    with pytest.raises(UserError, match=rf"{failing.url}.*failed.*can be reached.*{failing.address}"):
        list(Store(failing.url).list())


@pytest.mark.parametrize("url, names", [("s3://bucket", "AWS_ACCESS_KEY_ID"), ("az://box", "AZURE_STORAGE_ACCOUNT_KEY"),
                                        ("gs://bucket", "GOOGLE_APPLICATION_CREDENTIALS")])
def test_it_is_told_how_keys_are_set_where_neither_the_environment_nor_the_machine_has_some(url, names):
    asked = "Error performing token request: Error performing GET http://169.254.169.254/x in 2s - HTTP error: timeout"
    error = clouds.Cloud._failed(SimpleNamespace(_kind=clouds._kind(url)), f"{url}/x", "read", asked)
    assert re.fullmatch(rf"{url}/x: read was refused: the environment has no keys.*Set .*{names}.*\.", str(error))


def test_azures_keys_are_taken_by_the_names_of_its_own_program(azurite, monkeypatch):
    for name in ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY"):
        monkeypatch.setenv(name.replace("_ACCOUNT_NAME", "_ACCOUNT").replace("_ACCOUNT_KEY", "_KEY"), os.environ[name])
        monkeypatch.delenv(name)
    for scheme in ("az", "abfs", "abfss"):
        assert Store(f"{scheme}://{azurite.name}").put(scheme, b"1").size == 1
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "another")
    assert Store(f"abfss://{azurite.name}@drover.dfs.core.windows.net").put("by name", b"1").size == 1
    assert len(list(Store(f"abfss://{azurite.name}@drover.dfs.core.windows.net").list())) == 4
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT")
    with pytest.raises(UserError, match=r"Account must be specified.*AZURE_STORAGE_ACCOUNT_NAME"):
        Store(azurite.url).head("az")


def test_a_file_of_googles_keys_that_cannot_be_used_is_named(google, monkeypatch, tmp_path):
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "absent.json"))
    with pytest.raises(UserError, match=rf"{google.url} cannot be opened.*{tmp_path}/absent\.json.*GOOGLE_APPL"):
        Store(google.url).head("x")


def test_keys_are_taken_from_the_files_of_other_programs(seaweed, monkeypatch, tmp_path):
    files = {"AWS_SHARED_CREDENTIALS_FILE": "[default]\naws_access_key_id=x\naws_secret_access_key=y\n[mine]\n"
             f"aws_access_key_id = {os.environ['AWS_ACCESS_KEY_ID']}\naws_secret_access_key = {SECRET}\n",
             "AWS_CONFIG_FILE": "[profile mine]\nregion = us-east-1\n"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        monkeypatch.setenv(name, str(tmp_path / name))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_PROFILE", "mine")
    assert Store(seaweed.url).put("x", b"1").size == 1


def test_keys_that_are_renewed_in_a_file_are_taken(monkeypatch, tmp_path):
    file = tmp_path / "credentials"
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "absent"))

    def key(number):
        """The key in the file's next version, whose time does not depend on how fine the disk's times are."""
        file.write_text(f"[default]\naws_access_key_id = key-{number}\naws_secret_access_key = x\n")
        os.utime(file, ns=(number, number))
        return clouds.client("s3://bucket").config["access_key_id"]
    assert [key(1), key(2)] == ["key-1", "key-2"]
    assert clouds.client("s3://bucket") is clouds.client("s3://bucket")


def test_without_obstore_it_is_told_what_to_install(monkeypatch, tmp_path):
    clouds._opened.cache_clear()
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(UserError, match=r"pip install --editable '\.\[objects\]'"):
        list(Store("s3://bucket/x").list())
    folder = Store(f"file://{tmp_path}")
    folder.put("a/b", b"1")
    assert folder.read("a/b") == b"1"
