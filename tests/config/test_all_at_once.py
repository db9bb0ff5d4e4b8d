"""Wrong keys, wrong types and impossible combinations come in one report; names of other libraries are understood."""

import pytest

from drover.pipeline.config.explaining import ELSEWHERE, MEANINGS, explain
from drover.pipeline.config.loading import load_config
from drover.pipeline.config.section import keys_of
from drover.pipeline.config.tree import Config
from drover.pipeline.core.errors import UserError
from tests.config.files import refusal
from tests.refusal import refused, table


def test_keys_and_types_come_together_and_then_combinations(written):
    base = written("seed: 1\nshard:\n  nmae: 1\n", "base.yaml")
    text = """
nmae: x
base: base.yaml
model: {heads: 6, kv_heads: 4, dim: 252, context_length: 128}
train: {steps: 50, warmup_steps: 60, lr: fast, batch_tokens: 1000, sequence_length: 300, sample_tokens: 128}
tokenizer: {vocab_size: 70016}
encode: {dtype: uint16}
"""
    path = written(text)
    message = refusal(path, "parallel.tp=two", check=False)
    assert message.startswith("4 problems")
    for expected in (f"{path}:2: unknown key 'nmae'; did you mean 'name'", f"{base}:3: unknown key 'shard.nmae'",
                     f"{path}:5: 'train.lr' is 'fast'", "the command line (parallel.tp=two): 'parallel.tp'"):
        assert expected in message, message
    message = refusal(written(text.replace("nmae: x\nbase: base.yaml", "").replace("fast", "1")))
    assert message.startswith("6 problems")
    for expected in ("heads (6) must be divisible by kv_heads (4)", "60 is more than train.steps 50. Take fewer",
                     "batch_tokens 1000 is not a multiple of train.sequence_length 300",
                     "sequence_length 300 is longer than model.context_length 128",
                     "holds ids up to 65535, but the vocabulary of the tokenizer has 70016",
                     "train.sample_tokens 128 leaves no room"):
        assert expected in message, message


@pytest.mark.parametrize(("value", "steps"), table("""
    1e6 -> 1000000
    2.0 -> 2
    1_000 -> 1000
    2.5E1 -> 25""", str, int))
def test_whole_numbers_may_be_written_with_an_exponent(written, value, steps):
    path = written(f"train: {{steps: {value}}}\nlaunch: {{processes: 2e0}}\n")
    for overrides in (["name=1e3"], [f"train.steps={value}", "name=1e3"]):
        config = load_config(path, overrides, check=False)
        assert config.train.steps == steps and type(config.train.steps) is int
        assert config.launch.processes == 2 and config.name == "1e3"


def test_explain_understands_other_names_too():
    for key, meant in (("train.learning_rate", "train.lr"), ("train.lrr", "train.lr"), ("hidden_size", "model.dim"),
                       ("activation_checkpoint.mode", "train.activation_checkpointing"),
                       ("profiling.enable_profiling", "train.profile"), ("model.flavor", "model.preset"),
                       ("checkpoint.interval", "train.checkpoint.every_steps")):
        refused(UserError, f"There is no setting '{key}'; .* '{meant}'", explain, Config(), key)


def test_what_other_names_stand_for_exists_and_they_are_no_names_of_ours():
    known = {*keys_of(Config), "model.preset"}
    assert set(ELSEWHERE) <= known and set(MEANINGS) <= known
    for key, names in ELSEWHERE.items():
        section = key.rpartition(".")[0]
        assert not [name for name in names.split() if f"{section}.{name}".strip(".") in known - {key}], key


def test_explain_says_of_places_that_their_content_decides():
    assert "the content does" in explain(Config(), "train.init_from")
    assert "the content does" in explain(Config(), "tokenizer.path")
    assert "never makes a finished stage stale" in explain(Config(), "train.micro_batch")
    assert "filters, loggers, hooks or stages" in explain(Config(), "plugins")
    assert "llama3_8b" in explain(Config(), "model.preset"), "although a loaded configuration spells the shape"


ODD = ("5", "-1", "1e308", "1" + "0" * 400, str(2**63 - 1), ".inf", ".nan", "null", "''", "[]", "[[]]", "[null]", "{}",
       "{5: 5}", '"\\0"', '"\\ud800"', "'" + "x" * 10_000 + "'")


def written_at(key, value):
    """YAML in which a setting has a value."""
    *sections, last = key.split(".")
    return "".join(f"{'  ' * depth}{name}:\n" for depth, name in enumerate(sections)) + \
        f"{'  ' * len(sections)}{last}: {value}\n"


@pytest.mark.parametrize(("keys", "every"), [
    ([key for key in keys_of(Config) if "." not in key], 1),
    (["model.preset", "launch.cluster", "base", "train.mixture.web"], 1),
    pytest.param([key for key in keys_of(Config) if "." in key], 3, marks=pytest.mark.slow)],
    ids=["sections", "others", "all"])
def test_no_value_of_a_setting_ends_in_a_traceback(written, keys, every):
    """every: of the values that a setting is given; many have one type."""
    for number, key in enumerate(keys):
        for value in ODD[number % every::every]:
            path = written(written_at(key, value))
            try:
                load_config(path)
            except UserError as error:
                assert 0 < len(str(error)) < 4000, (key, value)


@pytest.mark.parametrize(("text", "expected"), [
    ("runs_dir: " + "x" * 300, "no file can have this name"),
    ('train: {init_from: "a\\0b"}', "no file can have this name"),
    ("name: " + "x" * 201, "at most 200 characters"), ("launch: {cluster: " + "x" * 5000 + "}", "name too long")])
def test_values_that_nothing_can_compute_with_are_named(written, text, expected):
    assert expected in refusal(written(text))
