"""Weights from form to form by the command: what goes with them, interruptions, refusals, memory."""

import itertools
import json
import os
import shutil
import sys
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from drover.model.config import ModelConfig
from drover.model.llama import Llama, initialise
from drover.pipeline.core.files import read_json, write_json
from drover.pipeline.formats import huggingface
from drover.pipeline.formats.weights import open_weights
from drover.pipeline.tokenization.conversion import open_tokenizer, write_hugging_face
from drover.tools.draft import Draft
from drover.tools.weights import main
from tests.conftest import run_python
from tests.cut_off import cut_off
from tests.formats.cutting import write_checkpoint
from tests.formats.exporting import write_model
from tests.hub_server import hub  # noqa: F401 - a fixture
from tests.refusal import printed
from tests.stages.limited import LARGE_TENSORS
from tests.tiny_models import for_tokenizer, write_run
from tests.tokenization.conftest import byte_level, chunks, files, rank_lines, texts, vocabularies  # noqa: F401

SHAPE = ModelConfig(dim=32, layers=2, heads=4, kv_heads=2, ffn_dim=48, vocab_size=512, context_length=128)


@pytest.fixture(scope="module")
def model():
    built = Llama(SHAPE)
    initialise(built, SHAPE, seed=7)
    return built


@pytest.fixture
def source(model, tmp_path):
    """A Hugging Face folder with all that such folders have beside weights."""
    folder = tmp_path / "source"
    folder.mkdir()
    write_model(folder, model, dtype=torch.float32, bos_id=256, eos_id=[257, 265], max_shard_bytes=60_000)
    tokenizer = open_tokenizer("tiktoken", vocabulary(tmp_path))
    write_hugging_face(tokenizer, folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [257, 265], "temperature": 0.6}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "special_tokens_map.json").write_text('{"bos_token": "<|begin_of_text|>"}')
    (folder / "README.md").write_text("not ours to carry")
    return folder


def vocabulary(folder):
    """A tokenizer.model of Llama 3's kind: every byte, no merges."""
    path = folder / "tokenizer.model"
    path.write_bytes(rank_lines(bytes([value]) for value in range(256)))
    return path


def carry(capsys, source, target, form, *more, expect=0):
    return printed(capsys, main, source, "--to", target, "--format", form, *more, expect=expect)


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_belongs_to_the_weights_goes_with_them_but_names_of_code(source, tmp_path, capsys, hub):  # noqa: F811
    """From the Hub, by way of torch's form, to Hugging Face's."""
    settings = source / "tokenizer_config.json"
    plain = read_json(settings)
    write_json(settings, {**plain, "auto_map": {"AutoTokenizer": ["evil.E", None]}})
    hub.push("someone/small", source)
    output = carry(capsys, "someone/small", tmp_path / "dcp", "dcp")
    assert f"21 tensors, {SHAPE.parameter_count:,} parameters in fp32" in output
    assert "tokenizer_config.json named code (auto_map), which is left out" in output
    output = carry(capsys, tmp_path / "dcp", tmp_path / "hf", "hf", "--shard-gb", "0.00006")
    before, after = contents(source), contents(tmp_path / "hf")
    assert after.keys() - before.keys() == {"weights.json"} and before.keys() - after.keys() == {"README.md"}
    assert json.loads(after.pop(settings.name)) == plain
    assert {name for name in after.keys() & before.keys() if after[name] != before[name]} == set()
    assert "Carried over: tokenizer.json, tokenizer_config.json, special_tokens_map.json, chat_template.jinja" in output


def test_a_tokenizer_model_alone_is_carried_and_what_lacks_is_said(model, tmp_path, capsys):
    """llama.cpp's converter would read Llama 3's beside the weights as sentencepiece's."""
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    write_model(theirs, model, dtype=torch.float32, bos_id=None, eos_id=None)
    data = vocabulary(theirs).read_bytes()
    output = carry(capsys, theirs, tmp_path / "hf", "hf")
    assert "original/tokenizer.model. There is no tokenizer.json" in output
    assert not (tmp_path / "hf/tokenizer.model").exists()
    carry(capsys, tmp_path / "hf", tmp_path / "again", "dcp")
    assert (tmp_path / "again/tokenizer.model").read_bytes() == data


def test_of_a_run_its_tokenizer_goes_with_the_newest_checkpoint(model, tmp_path, capsys):
    tokenizer = open_tokenizer("tiktoken", vocabulary(tmp_path))
    run = write_run(tmp_path / "runs/mini", {7: model}, tokenizer)
    vocabulary(run / "tokenizer")
    write_hugging_face(tokenizer, run / "tokenizer/hf")
    output = carry(capsys, run, tmp_path / "hf", "hf")
    assert "step-00000007 (drover)" in output and "tokenizer.json, tokenizer_config.json" in output
    assert read_json(tmp_path / "hf/config.json")["bos_token_id"] == 256
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "hf" / name).read_bytes() == (run / "tokenizer/hf" / name).read_bytes()
    output = carry(capsys, run / "train/checkpoints/step-00000007", tmp_path / "dcp", "dcp")
    assert "Carried over: tokenizer.json, tokenizer_config.json, tokenizer.model." in output


@pytest.mark.parametrize(("algorithm", "place"), [("bpe", "tokenizer.model"), ("unigram", "original/tokenizer.model")])
def test_a_sentencepiece_model_of_a_run_is_put_where_llama_cpp_reads_it_right(
        vocabularies, files, tmp_path, capsys, algorithm, place):  # noqa: F811
    """And names of special tokens, also those in a chat template, are tokens."""
    run = write_run(tmp_path / "mini", {7: for_tokenizer(vocabularies[algorithm])}, vocabularies[algorithm])
    shutil.copy(files[algorithm], run / "tokenizer")
    _, path = write_hugging_face(vocabularies[algorithm], run / "tokenizer/hf")
    new = read_json(path)
    write_json(path, {**new, "split_special_tokens": True})
    assert place in carry(capsys, run, tmp_path / "hf", "hf")
    assert (tmp_path / "hf" / place).read_bytes() == files[algorithm].read_bytes()
    assert read_json(tmp_path / "hf" / path.name) == new
    assert new["add_prefix_space"] is False and new["split_special_tokens"] is False


class Killed(BaseException):
    """As a kill is, nothing catches it."""


def test_killed_before_any_change_of_files_it_goes_on_and_comes_out_the_same(source, tmp_path, capsys):
    complete, target, going_on = tmp_path / "whole", tmp_path / "target", False
    arguments = [str(source), "--format", "hf", "--shard-gb", "0.00006", "--to"]
    assert main([*arguments, str(complete)]) == 0
    for number in itertools.count(1, 8):
        if cut_off(lambda: main([*arguments, str(target)]), target, number) == 0:
            break
        capsys.readouterr()
        assert main([*arguments, str(target)]) == 0
        going_on |= "was finished before" in capsys.readouterr().out
        assert {**contents(target), "weights.json": b""} == {**contents(complete), "weights.json": b""}
        assert not (tmp_path / "target.partial").exists()
        shutil.rmtree(target)
    assert number > 25 and going_on


def interrupted(capsys, monkeypatch, source, target):
    """Do a conversion but for its last rename."""
    def killed(folder):
        raise Killed
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Draft, "publish", killed)
        carry(capsys, source, target, "hf")
    return target.with_name(f"{target.name}.partial")


def test_what_was_begun_is_continued_as_far_as_it_is_the_same(source, tmp_path, capsys, monkeypatch):
    def refused(*more):
        return carry(capsys, source, tmp_path / "x", "hf", *more, expect=2)
    partial = interrupted(capsys, monkeypatch, source, tmp_path / "x")
    before, name = contents(partial), "model-00001-of-00001.safetensors"
    assert "started with other inputs (dtype)" in refused("--dtype", "bf16")
    (source / "chat_template.jinja").write_text("another")
    assert "other inputs (source)" in refused() and contents(partial) == before and not (tmp_path / "x").exists()
    again = interrupted(capsys, monkeypatch, source, tmp_path / "y")
    (again / name).write_bytes(before[name][:-1] + bytes([before[name][-1] ^ 1]))
    carry(capsys, source, tmp_path / "y", "hf")
    assert (tmp_path / "y" / name).read_bytes() == before[name], "a finished file counts only with its hash"
    shutil.rmtree(partial)
    partial.mkdir()
    (partial / "mine").write_text("precious")
    assert "is in the way: it has 'mine'" in refused()
    with Draft(tmp_path / "z", "weights.json", {}):
        assert "Another process is writing" in carry(capsys, source, tmp_path / "z", "hf", expect=2)


def test_what_is_at_the_target_is_left_as_it_is(source, tmp_path, capsys, monkeypatch):
    folder, link, new = (tmp_path / name for name in ("folder", "link", "new"))
    folder.mkdir()
    (folder / "mine").touch()
    link.symlink_to(tmp_path / "nowhere")
    publish, before = Draft.publish, sorted(tmp_path.iterdir())
    for target in ("/", folder, link, new):
        if target == new:  # where something comes while the conversion runs
            assert sorted(tmp_path.iterdir()) == before
            monkeypatch.setattr(Draft, "publish", lambda draft: (folder.rename(new), publish(draft)))
        assert "There is something else at" in carry(capsys, source, target, "hf", expect=2)
    assert [path.name for path in new.iterdir()] == ["mine"]


@pytest.mark.parametrize(("value", "message"), [
    (1e5, "beyond the largest of fp16, 65,504"), (float("nan"), "has NaN or infinite values (1)")])
def test_values_that_are_no_numbers_or_none_of_fp16_are_refused_by_the_tensors_name(source, value, message, tmp_path,
                                                                                    capsys):
    file = sorted(source.glob("*.safetensors"))[0]
    tensors = load_file(file)
    name = "model.embed_tokens.weight"
    tensors[name][0, 0] = value
    save_file(tensors, file, {"format": "pt"})
    output = carry(capsys, source, tmp_path / "to", "hf", "--dtype", "fp16", expect=2)
    assert message in output and f"{name} in " in output
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize(("error", "output", "status"), [
    (OSError(28, os.strerror(28)), "is exhausted", 2),
    (KeyboardInterrupt(), "x.partial keeps what is finished; the same command continues", 130)])
def test_a_full_disk_and_an_interruption_are_said_and_the_rest_follows(error, output, status, source, tmp_path, capsys,
                                                                       monkeypatch):
    monkeypatch.setattr(huggingface, "write_tensors", Mock(side_effect=error))
    assert output in carry(capsys, source, tmp_path / "x", "hf", expect=status)
    monkeypatch.undo()
    carry(capsys, source, tmp_path / "x", "hf")


LARGE = ModelConfig(dim=512, layers=12, heads=8, kv_heads=8, ffn_dim=2048, vocab_size=2048)
"""210 MB in float32, its largest tensors 4.2 MB."""
CARRY = """
import resource, sys
from pathlib import Path
import torch
from drover.pipeline.formats.weights import open_weights
from drover.tools.weights import convert
source, target = map(Path, sys.argv[1:])
convert(target / "small", target / "small-hf", "hf", None, 10**9)  # so that all libraries are loaded
def limit(allowed):
    used = int(next(line for line in open("/proc/self/status") if line.startswith("VmData")).split()[1]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (used + allowed, resource.RLIM_INFINITY))
limit(60_000_000)
convert(source, target / "hf", "hf", None, 50_000_000)
convert(target / "hf", target / "again", "hf", None, 10**9)
with open_weights(source) as large:
    try:
        whole = {name: large.read(name) for name in large.shapes}
    except RuntimeError as error:
        print("the limit is felt" if "memory" in str(error) else error)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the limit on a process's own memory works on Linux only")
def test_memory_is_needed_for_some_tensors_not_for_the_model(model, tmp_path):
    """210 MB go through 60 MB; read as a whole they do not."""
    with torch.device("meta"):
        shapes = {name: parameter.shape for name, parameter in Llama(LARGE).named_parameters()}
    (tmp_path / "small").mkdir()
    write_model(tmp_path / "small", model)
    write_checkpoint(tmp_path / "large", {f"model.{name}": torch.ones(shape) for name, shape in shapes.items()}, 2, 2)
    write_json(tmp_path / "large/COMPLETE.json", {
        "format": 2, "progress": {}, "files": [], "config": {"model": LARGE.model_dump(mode="json")}})
    done = run_python("-c", CARRY, tmp_path / "large", tmp_path, check=False, **LARGE_TENSORS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the limit is felt" in done.stdout
    with open_weights(tmp_path / "again") as weights:
        assert all(bool((weights.read(name) == 1).all()) for name in weights.shapes)
