"""What other programs make of an export: transformers that quantises while it loads, and the vocabulary of a GGUF file
as llama.cpp's converter reads it. Each where its library is installed."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TorchAoConfig

from tests.tiny_models import TOKENIZER_OF_BYTES, for_tokenizer, write_huggingface
from tests.tools.test_chat import TEMPLATE


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    model = for_tokenizer(TOKENIZER_OF_BYTES, dim=64, heads=2, kv_heads=1, ffn_dim=128)
    folder = write_huggingface(tmp_path_factory.mktemp("exported") / "hf", model, TOKENIZER_OF_BYTES)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def test_transformers_quantises_an_export_on_a_cpu(exported):
    pytest.importorskip("accelerate")
    quantisation = pytest.importorskip("torchao.quantization", reason="quantised loading needs torchao")
    ids = AutoTokenizer.from_pretrained(exported)("def main():", return_tensors="pt").input_ids
    with torch.no_grad():
        exact = AutoModelForCausalLM.from_pretrained(exported)(ids).logits
        model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32, quantization_config=TorchAoConfig(
            quantisation.Int8WeightOnlyConfig()))
        logits = model(ids).logits.float()
    assert type(model.model.layers[0].mlp.up_proj.weight) is not torch.nn.Parameter
    assert 0 < (logits - exact).std() < 0.1 * exact.std()


def test_the_vocabulary_of_a_gguf_file(exported):
    gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
    vocabulary = gguf.SpecialVocab(exported, load_merges=True)
    assert vocabulary.special_token_ids["bos"] == TOKENIZER_OF_BYTES.bos_id
    assert vocabulary.special_token_ids["eos"] == TOKENIZER_OF_BYTES.eos_id
    assert vocabulary.add_special_token["bos"] is True and not vocabulary.add_special_token.get("eos")
    assert vocabulary.chat_template == TEMPLATE

    known = list(gguf.BpeVocab(exported).all_tokens())
    for token in json.loads((exported / "tokenizer.json").read_text())["added_tokens"]:
        text, _, kind = known[token["id"]]  # llama.cpp knows the end of a turn by its name
        assert (text.decode(), kind) == (token["content"], gguf.TokenType.CONTROL)
