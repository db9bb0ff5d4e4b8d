"""What a model's generation_config.json says goes with a training that starts from it."""

import json

import pytest

from drover.pipeline.core.files import read_json, write_json
from drover.pipeline.records.weight_files import FILE, keep_settings, read_settings, settings_file
from tests.refusal import table
from tests.tiny_models import TOKENIZER_OF_BYTES, for_tokenizer, write_huggingface, write_run


@pytest.fixture
def model():
    return for_tokenizer(TOKENIZER_OF_BYTES)


def kept(weights, folder, bos=1, eos=2):
    keep_settings(weights, folder, bos, eos)
    return read_json(folder / FILE)


@pytest.mark.parametrize(("stated", "expected"), table("""
    [5, 2, 6] -> [5, 2, 6]
    2 -> 2
    7 -> [7, 2]
    [7] -> [7, 2]
    null -> 2""", json.loads, json.loads))
def test_every_id_that_ends_a_text_is_kept_and_eos_is_one(tmp_path, model, stated, expected):
    folder = write_huggingface(tmp_path / "hf", model, TOKENIZER_OF_BYTES)
    for name in (FILE, "config.json"):
        write_json(folder / name, read_json(folder / name) | {"eos_token_id": stated})
    assert kept(folder, tmp_path)["eos_token_id"] == expected


def test_what_only_config_json_says_counts_and_whose_file_it_was_does_not(tmp_path, model):
    folder = write_huggingface(tmp_path / "hf", model, TOKENIZER_OF_BYTES)
    write_json(folder / "config.json", read_json(folder / "config.json") | {"pad_token_id": 4})
    write_json(folder / FILE, {"_from_model_config": True, "transformers_version": "4", "top_p": 0.5})
    eos = TOKENIZER_OF_BYTES.eos_id
    assert kept(folder, tmp_path, 1, eos) == {"bos_token_id": 1, "eos_token_id": eos, "pad_token_id": 4, "top_p": 0.5}


def test_a_run_hands_it_on_from_its_folder_or_from_a_checkpoint(tmp_path, model):
    run = write_run(tmp_path / "run", {3: model}, TOKENIZER_OF_BYTES)
    assert kept(run, tmp_path) == {"bos_token_id": 1, "eos_token_id": 2}, "it said nothing"
    write_json(run / "train" / FILE, {"eos_token_id": [9, 2], "temperature": 0.6})
    for place in (run, run / "train/checkpoints/step-00000003"):
        assert kept(place, tmp_path) == {"bos_token_id": 1, "eos_token_id": [9, 2], "temperature": 0.6}
    assert settings_file(run / "train/checkpoints/step-00000003") == run.resolve() / "train" / FILE


def test_a_training_from_random_weights_has_none_of_an_earlier_one(tmp_path):
    write_json(tmp_path / FILE, {"temperature": 0.6})
    keep_settings(None, tmp_path, 1, 2)
    assert read_settings(tmp_path / FILE) == {}
