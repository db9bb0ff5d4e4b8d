"""Names on the Hub: which paths are meant, what is downloaded, when the Hub is contacted, and what is refused how."""

import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from drover.pipeline.core.errors import UserError
from drover.pipeline.storage.model_hub import hub_folder, names_the_hub, pinned
from tests.hub_server import TOKEN, hub  # noqa: F401 - a fixture
from tests.refusal import refused

NAME = "someone/llama"
TEXTS = ["config.json", "original/tokenizer.model", "tokenizer.json"]
OTHERS = ["README.md", "consolidated.safetensors", "evil.py", "onnx/model.safetensors", "pytorch_model.bin"]


@pytest.fixture
def folder(tmp_path):
    """A repository: what is needed of it, and what is not."""
    for name in (*TEXTS, "model.safetensors", *OTHERS):
        (tmp_path / "theirs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "theirs" / name).write_text(name)
    return tmp_path / "theirs"


def names(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_local_paths_are_never_taken_for_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("meta-llama/Llama-3.2-1B", "a/b@v1.0", "a/b@refs/pr/1"):
        assert names_the_hub(name)
    (tmp_path / "meta-llama").mkdir()
    assert not names_the_hub("meta-llama/Llama-3.2-1B")  # more likely a misspelt folder
    assert names_the_hub("meta-llama/Llama-3.2-1B@main")
    (tmp_path / "meta-llama/Llama-3.2-1B@main").mkdir()
    for path in ("tokenizer.json", "/a/b", "./a/b", "a/b/c", "../a", "s3://a", f"a/{'b' * 5000}",
                 "meta-llama/Llama-3.2-1B@main"):
        assert not names_the_hub(path)


def test_the_needed_files_are_downloaded_once_and_a_commit_stays(hub, folder, tmp_path):  # noqa: F811
    commit = hub.push(NAME, folder)
    assert pinned(NAME) == f"{NAME}@{commit}"
    assert names(hub_folder(NAME)) == TEXTS and sorted(hub.downloaded) == sorted(Path(name).name for name in TEXTS)
    (folder / "config.json").write_text("another")
    moved = hub.push(NAME, folder, "v2")
    assert pinned(NAME) == f"{NAME}@{commit}" and pinned(f"{NAME}@v2") == f"{NAME}@{moved}"
    assert pinned(NAME, None, "other/llama@v1", f"{NAME}@{moved}") == f"{NAME}@{moved}"
    assert names(hub_folder(NAME, weights=True, download=True)) == sorted([*TEXTS, "model.safetensors"])
    assert hub.downloaded.count("model.safetensors") == 1
    hub.seen.clear()
    assert hub_folder(f"{NAME}@{commit}", weights=True, download=True).name == commit
    assert hub.seen == []


def test_what_is_not_there_is_refused_with_a_command_that_fetches_it(hub, folder, monkeypatch):  # noqa: F811
    commit = hub.push(NAME, folder, "v1")
    hub.off = True
    for name, revision in ((NAME, ""), (f"{NAME}@{commit}", f" --revision {commit}")):
        text = refused(UserError, rf"^{name} is no folder here, so it is {NAME} on the Hugging Face Hub, but its files "
                       rf"are not all in the cache {hub.home}/hub, and the download failed \(.*\)\. Where there is a "
                       rf"network, this fetches them into the cache: hf download {NAME}{revision} --include ",
                       hub_folder, name, weights=True, download=True)
        hub.off = False
        command = re.search(r"hf download .*(?=\.)", text)[0]
        done = subprocess.run(f"{sysconfig.get_path('scripts')}/{command}", shell=True,
                              env={"PATH": "/usr/bin:/bin", **hub.variables}, capture_output=True, text=True,
                              check=False)
        assert done.returncode == 0, done.stderr
        hub.off = True
        assert hub_folder(name, weights=True).name == commit
        shutil.rmtree(hub.home / "hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    hub.seen.clear()
    refused(UserError, "the download failed .*HF_HUB_OFFLINE", hub_folder, NAME, download=True)
    refused(UserError, "not all in the cache [^ ]*/hub. Where", hub_folder, NAME)
    assert hub.seen == []


def test_names_revisions_and_rights_are_refused_each_with_what_to_do(hub, folder, monkeypatch):  # noqa: F811
    hub.push(NAME, folder)
    hub.push("someone/hidden", folder)
    hub.push("someone/closed", folder)
    hub.hidden.add("someone/hidden")
    hub.closed.add("someone/closed")
    (folder / "model.safetensors").unlink()
    hub.push("someone/pickled", folder)

    def denied(name, message):
        refused(UserError, message, hub_folder, name, weights=True, download=True)
    denied("someone/else", r"\(RepositoryNotFoundError\): correct the name")
    denied("someone/hidden", "or log in")
    denied("someone/closed", r"\(GatedRepoError\).* request .* https://huggingface.co/someone/closed")
    denied(f"{NAME}@v9", r"\(RevisionNotFoundError\): .* what follows the @")
    denied("someone/pickled", r"has no model\*\.safetensors, and other weights are not downloaded")
    denied("some--one/x", "the download failed")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    for name in ("someone/hidden", "someone/closed"):
        assert "config.json" in names(hub_folder(name, weights=True, download=True))
