"""Datasets of the Hugging Face Hub and folders of them as sources."""

import pytest

from pipeline.config.data import HubSource
from pipeline.data.sources import input_files
from pipeline.errors import UserError
from tests.data.source_files import config_of, read, texts, write_jsonl


def hub_source(folder, **fields):
    return HubSource(kind="hf", name="h", dataset=str(folder), **fields)


@pytest.fixture(scope="module")
def dataset_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dataset")
    for part in range(2):
        write_jsonl(folder / f"part-{part}.jsonl", [{"text": f"text {part} {row}", "stars": row} for row in range(20)])
    return folder


@pytest.mark.parametrize("streaming", [True, False])
def test_a_local_hugging_face_dataset(dataset_folder, tmp_path, monkeypatch, streaming):
    import datasets
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    source = hub_source(dataset_folder, streaming=streaming, meta_fields=["stars"], limit=30)
    documents, rejections = read(source)
    assert texts(documents) == [f"text {part} {row}" for part in range(2) for row in range(20)][:30]
    assert rejections == [] and documents[29].id == "train:30" and documents[29].meta == {"stars": 9}
    assert [name for name, _ in input_files(config_of(source))] == ["h/part-0.jsonl", "h/part-1.jsonl"]


def test_a_hugging_face_dataset_that_cannot_be_loaded_says_so(dataset_folder, tmp_path):
    with pytest.raises(UserError, match=r"no column 'body'.*text, stars"):
        read(hub_source(dataset_folder, text_field="body"))
    with pytest.raises(UserError, match=r"(?s)split='nosplit'.*failed"):
        read(hub_source(dataset_folder, split="nosplit"))
    (tmp_path / "f.jsonl").write_text('{"text": "a"}\n{"text": \n')
    with pytest.raises(UserError, match=r"reading broke off.*kind: files"):
        read(hub_source(tmp_path))


def test_a_local_dataset_that_is_not_there_is_refused_first(tmp_path):
    (tmp_path / "f.jsonl").write_text("{}")
    for name in (tmp_path / "gone", tmp_path / "f.jsonl"):
        with pytest.raises(UserError, match=r"is no folder.*kind: files"):
            input_files(config_of(hub_source(name)))
    (tmp_path / "bare").mkdir()
    with pytest.raises(UserError, match="holds no files"):
        input_files(config_of(hub_source(tmp_path / "bare")))
    assert input_files(config_of(hub_source("someone/something"))) == []
