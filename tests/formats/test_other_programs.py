"""What other programs make of an export: transformers that quantises while it loads, and the vocabulary of a GGUF file
as llama.cpp's converter reads it. Each where its library is installed."""

import importlib.util
import json
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.tiny_models import TOKENIZER_OF_BYTES, for_tokenizer, write_huggingface
from tests.tools.test_chat import TEMPLATE


def nf4() -> dict[str, Any]:
    from transformers import BitsAndBytesConfig
    return {"device_map": "cpu", "quantization_config": BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32)}


def torchao_int8() -> dict[str, Any]:
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig
    return {"quantization_config": TorchAoConfig(Int8WeightOnlyConfig()), "dtype": torch.float32}


WAYS = [  # what it needs, how far logits may be off, of their spread
    (nf4, ("bitsandbytes", "accelerate"), 0.5), (torchao_int8, ("torchao", "accelerate"), 0.1)]


def installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    model = for_tokenizer(TOKENIZER_OF_BYTES, dim=64, heads=2, kv_heads=1, ffn_dim=128)
    folder = write_huggingface(tmp_path_factory.mktemp("exported") / "hf", model, TOKENIZER_OF_BYTES)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.mark.parametrize(("way", "needs", "bound"), WAYS, ids=[way.__name__ for way, *_ in WAYS])
def test_transformers_quantises_an_export_on_a_cpu(exported, way, needs, bound):
    if missing := [name for name in needs if not installed(name)]:
        pytest.skip(f"quantised loading needs {' and '.join(needs)}; not installed: {', '.join(missing)}")
    ids = AutoTokenizer.from_pretrained(exported)("def main():", return_tensors="pt").input_ids
    with torch.no_grad():
        exact = AutoModelForCausalLM.from_pretrained(exported)(ids).logits
        model = AutoModelForCausalLM.from_pretrained(exported, **way())
        logits = model(ids).logits.float()
    assert type(model.model.layers[0].mlp.up_proj) is not torch.nn.Linear or \
        type(model.model.layers[0].mlp.up_proj.weight) is not torch.nn.Parameter
    assert 0 < (logits - exact).std() < bound * exact.std()


def test_the_vocabulary_of_a_gguf_file(exported, tmp_path):
    gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
    vocabulary = gguf.SpecialVocab(exported, load_merges=True)
    assert vocabulary.special_token_ids["bos"] == TOKENIZER_OF_BYTES.bos_id
    assert vocabulary.special_token_ids["eos"] == TOKENIZER_OF_BYTES.eos_id
    assert vocabulary.add_special_token["bos"] is True and not vocabulary.add_special_token.get("eos")
    assert vocabulary.chat_template == TEMPLATE

    writer = gguf.GGUFWriter(tmp_path / "vocabulary.gguf", "llama")
    tokens, types = [], []
    known = gguf.BpeVocab(exported)
    for text, _, kind in known.all_tokens():
        tokens.append(text)
        types.append(kind)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    vocabulary.add_to_gguf(writer, quiet=True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    fields = gguf.GGUFReader(tmp_path / "vocabulary.gguf").fields
    read = [str(fields["tokenizer.ggml.tokens"].contents(index)) for index in range(len(tokens))]
    special = json.loads((exported / "tokenizer.json").read_text())["added_tokens"]
    for token in special:  # llama.cpp knows the end of a turn by its name
        assert read[token["id"]] == token["content"] and types[token["id"]] == gguf.TokenType.CONTROL
    assert fields["tokenizer.ggml.bos_token_id"].contents() == TOKENIZER_OF_BYTES.bos_id
    assert fields["tokenizer.ggml.add_bos_token"].contents() is True
    assert fields["tokenizer.chat_template"].contents() == TEMPLATE
