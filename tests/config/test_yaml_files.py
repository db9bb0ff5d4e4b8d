"""What a YAML file may hold, and what is said of one that cannot be read."""

import os
import threading

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


@pytest.mark.parametrize("text", ["train: {<<: 5}\n", "train: {<<: [1]}\n", "train: {<<: [[{steps: 3}]]}\n"])
def test_only_mappings_can_be_merged(written, text):
    assert "for merging, but found" in refusal(written(text))


@pytest.mark.parametrize("text", ["train: &x {lr: *x}\n", "train: &x\n  prompts: [a, *x]\n", "shard: &x {<<: *x}\n",
                                  "train: &x {guards: {spike: [[*x]]}}\n", "&x shard: {sources: &y [[*y]]}\n"])
def test_an_alias_inside_of_itself(tmp_path, written, text):
    said = refusal(written(text))
    assert f"{tmp_path}/c.yaml:" in said and "the value of an alias contains the alias itself" in said


def test_aliases_of_aliases_are_counted_before_they_are_written_out(written, monkeypatch):
    """2^40 values in 42 lines; of an override, too."""
    doubled = ", ".join(f"&a{number} [*a{number - 1}, *a{number - 1}]" for number in range(1, 41))
    said = refusal(written(f"train: {{prompts: [&a0 x, {doubled}]}}\n"))
    assert "c.yaml has 4,398,0" in said and "at most 100,000 are allowed" in said
    path = written("name: x\n", "d.yaml")
    assert "The override train.prompts has 4,398,0" in refusal(path, f"train.prompts=[&a0 x, {doubled}]")
    monkeypatch.setattr("drover.pipeline.config.yaml_source.MOST_VALUES", 100)
    many = f"train.prompts=[{', '.join(['x'] * 101)}]"  # written out
    assert len(load_config(path, [many], check=False).train.prompts) == 101
    assert "is not valid YAML" in refusal(path, "train.prompts=x\x01")
    assert "the tag tag:yaml.org,2002:python/" in refusal(path, "train.prompts=!!python/object/apply:os.system [ls]")
    assert "nested too deeply" in refusal(path, f"train.prompts={'[' * 3000}")
    assert "has half of a surrogate pair" in refusal(path, 'launch.train.partition="\\ud800"')
    assert load_config(path, ['runs_dir="caf\\udce9"'], check=False).runs_dir == "caf\udce9"  # a byte, see os.fsdecode


@pytest.mark.parametrize(("data", "words"), [
    (b"name: x\ntrain: {prompts: [caf\xe9]}\n", "c.yaml:2: the byte 0xe9 is not UTF-8"),
    ("name: x\n".encode("utf-16"), "c.yaml is UTF-16, not UTF-8"), (b"[" * 20_000, "nested too deeply"),
    (b'\nlaunch: {extra: {"\\ud83d\\ude00": x}}', r"c.yaml:2: '\ud83d\ude00' has half of a surrogate pair"),
    (b"name: \x00\n", "c.yaml, position 6"), (b"name: [a\n", "c.yaml, line 1, column 7"),
    (b"train: [1\n", "not valid YAML"), (b"name: a\ntrain: {}\nname: b\n", "written twice"), (b"- 1\n", "mapping"),
    *((b"name: !!python/" + tag, "c.yaml:1: the tag tag:yaml.org,2002:python/") for tag in (
        b"name:os.system", b"object/apply:os.system [ls]", b"object/new:x {a: 1}"))])
def test_files_that_cannot_be_read(written, data, words):
    assert words in refusal(written(data))


def test_a_byte_order_mark_of_utf_8_is_no_part_of_the_first_key(written):
    assert load_config(written(b"\xef\xbb\xbfname: y\n")).name == "y"


def test_a_missing_file_is_told_with_the_folder_and_with_who_named_it(tmp_path, written, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = refusal("configs/mine.yaml")
    assert f"looked in {tmp_path}/configs" in said and "Give an existing file with --config." in said
    said = refusal(written("name: x\nbase: other.yaml\n"))
    assert f"{tmp_path}/other.yaml cannot be read" in said and f"Correct `base:` in {tmp_path}/c.yaml:2" in said
    for base in ("[1, other.yaml]", "{a: 1}", "2"):
        assert "`base` is a file name or a list" in refusal(written(f"base: {base}\n"))
    assert str(tmp_path / "clusters" / "ours.yaml") in refusal(written("launch: {cluster: ours}\n"))


def test_a_configuration_may_come_through_a_pipe_and_its_base_may_not(tmp_path):
    """As the shell makes one of `--config <(...)`."""
    os.mkfifo(tmp_path / "pipe")
    for text, expected in (("name: piped", "piped"), ("base: /dev/zero", None)):
        writer = threading.Thread(target=(tmp_path / "pipe").write_text, args=(text,))
        writer.start()
        if expected:
            assert load_config(tmp_path / "pipe").name == expected
        else:
            assert "it is not a regular file" in refusal(tmp_path / "pipe")
        writer.join()


@pytest.mark.parametrize(("size", "expected"), [(1 << 42, "4,398,046,511,104 bytes"), (5_000_000, "5,000,000 bytes")])
def test_a_file_that_is_too_large_is_not_read(tmp_path, size, expected):
    (tmp_path / "c.yaml").touch()
    os.truncate(tmp_path / "c.yaml", size)
    assert f"it has {expected}; at most" in refusal(tmp_path / "c.yaml")
