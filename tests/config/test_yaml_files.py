"""What a YAML file may hold, and what is said of one that cannot be read."""

import os

import pytest

from drover.pipeline.config.loading import load_config
from tests.config.files import refusal


def test_merge_keys(written):
    """Own keys win over merged ones, earlier merged mappings over later ones; nested ones are replaced whole."""
    config = load_config(written("""
train: &small {steps: 7, warmup_steps: 2, checkpoint: {keep: 5, every_steps: 3}}
launch:
  shard: &one {cpus: 3, mem: 5G}
  encode: {<<: *one, mem: 7G}
  tokenizer: {<<: [{mem: 1G}, *one]}
"""))
    launch = config.launch
    assert (launch.encode.cpus, launch.encode.mem) == (3, "7G") and config.train.checkpoint.keep == 5
    assert (launch.tokenizer.cpus, launch.tokenizer.mem) == (3, "1G")


def test_a_problem_in_what_was_merged_is_named_where_it_was_written(written):
    path = written("launch:\n  shard: &one\n    cpus: many\n  encode:\n    <<: *one\n    mem: [7]\n")
    text = refusal(path)
    assert f"{path}:3: 'launch.shard.cpus'" in text and f"{path}:3: 'launch.encode.cpus'" in text
    assert f"{path}:6: 'launch.encode.mem'" in text


@pytest.mark.parametrize("text", ["train: &x {lr: *x}\n", "train: &x\n  prompts: [a, *x]\n",
                                  "train: &x {guards: {spike: [[*x]]}}\n", "&x shard: {sources: &y [[*y]]}\n"])
def test_an_alias_inside_of_itself(tmp_path, written, text):
    message = refusal(written(text))
    assert f'found unconstructable recursive node\n  in "{tmp_path}/c.yaml", line ' in message


def test_aliases_that_make_more_than_memory_holds(written):
    lines = [f"{name}: &{name} [{', '.join([below] * 10)}]" for below, name in zip(
        ["x", "*a", "*b", "*c", "*d", "*e", "*f"], "abcdefg", strict=True)]
    assert "more than 1,048,576 values" in refusal(written("\n".join(lines)))


def test_overrides_that_cannot_be_read(written):
    path = written("name: x\n", "d.yaml")
    assert "is not valid YAML" in refusal(path, "train.prompts=x\x01")
    assert "constructor for the tag" in refusal(path, "train.prompts=!!python/object/apply:os.system [ls]")
    assert "nested too deeply" in refusal(path, f"train.prompts={'[' * 3000}")
    assert load_config(path, ['runs_dir="caf\\udce9"'], check=False).runs_dir == "caf\udce9"  # a byte, see os.fsdecode


@pytest.mark.parametrize(("data", "words"), [
    (b"name: x\ntrain: {prompts: [caf\xe9]}\n", "c.yaml:2: the byte 0xe9 is not UTF-8"),
    ("name: x\n".encode("utf-16"), "c.yaml:1: the byte 0xff is not UTF-8"), (b"[" * 20_000, "nested too deeply"),
    (b"name: \x00\n", "position 6"), (b"name: [a\n", 'c.yaml", line 1, column 7'),
    *((b"train: {<<: " + merged + b"}", "for merging, but found") for merged in (b"5", b"[1]", b"[[{steps: 3}]]")),
    (b"train: [1\n", "not valid YAML"),
    (b"train:\n  steps 5\n\n  lr: 1\n", "look at the line before: a colon"),
    (b"name: a\ntrain: {}\nname: b\n", "written twice"), (b"- 1\n", "mapping"),
    *((b"name: !!python/" + tag, "constructor for the tag 'tag:yaml.org,2002:python/") for tag in (
        b"name:os.system", b"object/apply:os.system [ls]", b"object/new:x {a: 1}"))])
def test_files_that_cannot_be_read(written, data, words):
    assert words in refusal(written(data))


def test_a_byte_order_mark_of_utf_8_is_no_part_of_the_first_key(written):
    assert load_config(written(b"\xef\xbb\xbfname: y\n")).name == "y"


def test_a_missing_file_is_told_with_the_folder_and_with_who_named_it(tmp_path, written, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = refusal("configs/mine.yaml")
    assert f"looked in {tmp_path}/configs" in message and "Give an existing file; " in message
    message = refusal(written("name: x\nbase: other.yaml\n"))
    assert f"{tmp_path}/other.yaml cannot be read" in message and f"Correct `base:` in {tmp_path}/c.yaml:2" in message
    for base in ("[1, other.yaml]", "{a: 1}", "2"):
        assert "`base` is a file name or a list" in refusal(written(f"base: {base}\n"))
    message = refusal(written("launch: {cluster: ours}\n"))
    assert f"{tmp_path}/ours cannot be read" in message
    assert f"It is the cluster profile of {tmp_path}/c.yaml:1." in message


@pytest.mark.parametrize(("size", "expected"), [(1 << 42, "4,398,046,511,104 bytes"), (5_000_000, "5,000,000 bytes")])
def test_a_file_that_is_too_large_is_not_read(tmp_path, size, expected):
    (tmp_path / "c.yaml").touch()
    os.truncate(tmp_path / "c.yaml", size)
    assert f"it has {expected}; at most" in refusal(tmp_path / "c.yaml")
