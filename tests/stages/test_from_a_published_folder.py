"""What most who start from somebody's weights do: a Hugging Face folder of Llama 3.2's kind is trained further on a
longer context and goes out again with everything that it came with."""

import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from tokenizers import processors
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from drover.pipeline.contract.manifest import read_manifest
from drover.pipeline.contract.stages import STAGES
from drover.pipeline.core.files import read_json, sha256_file
from tests.conftest import run_python, run_stage, write_config
from tests.hub_server import hub  # noqa: F401 - a fixture
from tests.pages import files
from tests.stages.training import curve
from tests.token_shards import shards_in
from tests.tokenization.conftest import byte_level, texts, with_special  # noqa: F401
from tests.tokenization.test_ready import TEMPLATE

pytestmark = pytest.mark.slow

NAMES = ["<|begin_of_text|>", "<|end_of_text|>", "<|finetune_right_pad_id|>", "<|start_header_id|>",
         "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>"]
SCALING = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 64}
FAST = ["train.precision=fp32", "train.steps=2", "train.warmup_steps=1", "train.validation_every=1",
        "train.validation_tokens=100", "train.sample_every=100", "train.batch_tokens=2048", "train.micro_batch=1",
        "train.lr=1e-3"]


@pytest.fixture(scope="module")
def source(tmp_path_factory, byte_level):  # noqa: F811
    """The folder, as transformers writes it."""
    folder = tmp_path_factory.mktemp("published")
    tokenizer = with_special(byte_level, *NAMES)
    bos, pad, *ends = (tokenizer.token_to_id(NAMES[index]) for index in (0, 2, 1, 5, 6))
    tokenizer.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=False),
        processors.TemplateProcessing(single=[NAMES[0], "$A"], special_tokens=[(NAMES[0], bos)])])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": NAMES[0], "eos_token": "<|eot_id|>",
        "auto_map": {"AutoTokenizer": [None, "evil.Evil"]},
        "chat_template": TEMPLATE, "model_max_length": 256, "clean_up_tokenization_spaces": True}))
    (folder / "evil.py").write_text(f"open({str(folder / 'executed')!r}, 'w')\nclass Evil: ...\n")
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, rms_norm_eps=1e-5,
        tie_word_embeddings=True, bos_token_id=bos, eos_token_id=ends, pad_token_id=pad,
        rope_parameters={**SCALING, "rope_theta": 5e5}, initializer_range=0.15)).to(torch.bfloat16)
    model.generation_config.update(do_sample=True, temperature=0.6, top_p=0.9)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def further(tmp_path_factory, source, corpus):
    """Config of a run that was trained further on a longer context, and what its stages said."""
    config = write_config(tmp_path_factory.mktemp("further"), corpus, shard={"shard_mb": 4}, evaluate={"tasks": []},
                          launch={"processes": 1}, tokenizer={"kind": "huggingface", "path": str(source)},
                          train={"init_from": str(source), "sequence_length": 512})
    settings = yaml.safe_load(config.read_text())
    settings["model"] = {"preset": str(source), "context_length": 512, "rope_theta": 1e6}
    config.write_text(yaml.safe_dump(settings))
    # One shard and one window of validation text for two ranks.
    return config, {stage: run_stage(stage, config, *FAST, ranks=2 if stage == "train" else 1) for stage in STAGES}


def own_loss(folder, config, shard, samples):
    """What transformers says of the tokens that the first step saw, in float64."""
    model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float64)
    losses = []
    for document, begin, end in samples:
        ids = torch.from_numpy(shard.document_tokens(document)[begin:end + 1].astype("int64"))
        with torch.no_grad():
            losses.append(cross_entropy(model(ids[None, :-1]).logits[0], ids[1:], reduction="none"))
    return torch.cat(losses).mean().item()


def test_it_begins_at_the_loss_that_transformers_says(further, source, capsys):
    from drover.tools.trace.__main__ import main as trace
    config, outputs = further
    folder, output = config.parent / "runs/mini", outputs["train"].stdout
    assert "rope_scaling" not in output, "what the folder says is kept where nothing else is asked for"
    assert "context_length 256 -> 512; rope_theta 500000.0 -> 1000000.0" in output and "new rows" not in output
    assert trace(["--run", str(folder), "--step", "1"]) == 0
    samples = [map(int, numbers) for numbers in re.findall(
        r"document (\d+) .* tokens (\d+)\.\.(\d+)", capsys.readouterr().out)]
    longer = AutoConfig.from_pretrained(source)
    longer.rope_parameters = {**longer.rope_parameters, "rope_theta": 1e6}
    [shard] = shards_in(folder / "encode", read_manifest(folder / "encode").outputs, "train", "code")
    assert curve(config)[0]["loss"] == pytest.approx(own_loss(source, longer, shard, samples), rel=1e-6)


def test_everything_that_it_came_with_goes_out_again(further, source):
    config, outputs = further
    out = config.parent / "runs/mini/convert/hf"
    theirs, ours = (read_json(place / "tokenizer_config.json") for place in (source, out))
    assert theirs.pop("auto_map") and ours == {**theirs, "model_max_length": 512}
    assert not (source / "executed").exists()
    assert "tokenizer_config.json names code (auto_map), which is left out" in outputs["tokenizer"].stdout
    assert (out / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    before, after = (read_json(place / "generation_config.json") for place in (source, out))
    for mine in ("transformers_version", "_from_model_config"):
        before.pop(mine, None)
    assert after == before and len(after["eos_token_id"]) == 3 and after["temperature"] == 0.6
    shape = AutoConfig.from_pretrained(out)
    assert shape.rope_parameters == {**SCALING, "rope_theta": 1e6} and shape.tie_word_embeddings
    assert shape.max_position_embeddings == 512
    assert shape.eos_token_id == after["eos_token_id"] and shape.pad_token_id == after["pad_token_id"]
    report = (config.parent / "runs/mini/report.md").read_text()
    assert f"started from the weights in …/{source.parent.name}/{source.name} and trained on" in report


def test_by_its_name_on_the_hub_it_stays_the_same(corpus, source, tmp_path, hub):  # noqa: F811
    """As on the page about it. Where stages have no network: the plan downloads all that they read. That the default
    branch may move: tests/config/test_loading.py."""
    [(written, text)] = [item for item in files("continue").items() if "smol" in item[0]]
    config, run = tmp_path / Path(written).name, tmp_path / "smol"
    config.write_text(text)
    [name] = set(re.findall(r"\w+/SmolLM2-135M", text))
    commit = hub.push(name, source)

    def launched(command, *arguments, check=True):
        return run_python("-m", "drover", command, "--config", config, "--cluster", "local", *FAST,
                          f"runs_dir={tmp_path}", f"shard.sources.0.paths=[{corpus}/*.txt]", "shard.shard_mb=4",
                          "train.sequence_length=256", "launch.processes=1", *arguments, check=check, **hub.variables)
    hub.off = True
    refusal = launched("plan", check=False)
    assert refusal.returncode == 2 and "smol.yaml" in refusal.stderr and f"hf download {name} " in refusal.stderr
    hub.off = False
    assert f"start     from the weights in {name}@{commit}" in launched("plan").stdout
    hub.off = True
    launched("run", "--stage", "shard,tokenizer,encode,train")
    for stage, setting in (("tokenizer", "tokenizer.path"), ("train", "train.init_from")):
        manifest = read_manifest(run / stage)
        assert manifest.places[setting] == f"{name}@{commit}"
        assert {record["sha256"] for record in manifest.files} <= {sha256_file(path) for path in source.iterdir()}
