"""A tokenizer by its name on the Hub: the real client over a cache of its own, without a network."""


import huggingface_hub
import pytest

from drover.pipeline.core.errors import UserError
from drover.pipeline.tokenization.files import fetched, names_the_hub
from tests.refusal import refused

FILES = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The library's cache, an empty folder; there is no network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path / "models--someone--some-model"


def test_what_is_in_the_cache_is_taken_from_there(cache):
    result = cache / "snapshots" / ("0123456789" * 4)
    for path, text in ((cache / "refs/main", result.name), (result / FILES[0], "{}")):
        path.parent.mkdir(parents=True)
        path.write_text(text)
    assert fetched("someone/some-model", FILES) == result


def test_the_hub_is_contacted_if_the_cache_has_nothing(cache, monkeypatch):
    wanted, real = [], huggingface_hub.snapshot_download

    def download(name, **wishes):
        wanted.append(wishes)
        return real(name, **wishes) if wishes.get("local_files_only") else str(cache)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert fetched("someone/some-model", FILES) == cache
    assert wanted == [{"allow_patterns": FILES, "local_files_only": True}, {"allow_patterns": FILES}]


def test_where_there_is_no_network_it_says_what_to_do(cache):
    refused(UserError, r"^tokenizer\.path: there is no someone/some-model here.*"
            "hf download someone/some-model tokenizer.json tokenizer_config.json --local-dir",
            fetched, "someone/some-model", FILES)


def test_local_paths_are_never_taken_for_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert names_the_hub("meta-llama/Llama-3.2-1B")
    (tmp_path / "meta-llama").mkdir()
    assert not names_the_hub("meta-llama/Llama-3.2-1B")  # more likely a misspelt folder
    for path in ("tokenizer.json", "/a/b", "./a/b", "a/b/c", "../a", "s3://a"):
        assert not names_the_hub(path)
