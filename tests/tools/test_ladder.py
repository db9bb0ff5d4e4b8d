"""A ladder of small trainings: its file, its plan, and a tiny one to its end."""

import json
import re

import pytest
import yaml

from drover.pipeline.config.loading import load_config
from drover.pipeline.core.errors import UserError
from drover.tools.ladder import main, read_ladder, rungs_of
from tests.conftest import write_config
from tests.refusal import printed

LADDER = {"base": "mini.yaml", "parameters": ["100k", "500k", "1.5M"], "tokens": ["20k", "40k", "80k"],
          "lr": [0.003, 0.01, 0.03], "predict": {"parameters": "3M", "tokens": "100k"}}


@pytest.fixture
def ladder(tmp_path, corpus):
    """The file of a ladder over the miniature configuration; call it with changes."""
    write_config(tmp_path, corpus)

    def write(**changes):
        path = tmp_path / "steps.yaml"
        path.write_text(yaml.safe_dump({key: value for key, value in {**LADDER, **changes}.items()
                                        if value is not None}))
        return path
    return write


def rungs(path):
    return rungs_of(*read_ladder(path), path)


def test_every_combination_is_a_run_in_the_shape_next_to_its_size(ladder):
    made = rungs(ladder(lr=[0.01, 0.01]))
    assert [(rung.shape.layers, rung.shape.dim) for rung in made] == [(1, 64)] * 3 + [(2, 128)] * 3 + [(3, 192)] * 3
    assert [rung.tokens for rung in made[:3]] == [20 * 1024, 39 * 1024, 78 * 1024]
    assert made[0].name == "102.6k-20.48k-lr0.01"
    relative = rungs(ladder(tokens=None, tokens_per_parameter=[0.5, 1]))
    assert [round(rung.tokens / rung.parameters, 1) for rung in relative[::3]] == [0.5, 1.0] * 3


def test_the_settings_of_a_run_give_the_size_and_keep_the_base(ladder):
    path = ladder()
    file, base = read_ladder(path)
    rung = rungs_of(file, base, path)[-1]
    own = load_config(path.parent / "mini.yaml", [f"{key}={json.dumps(value)}" for key, value in rung.settings.items()])
    assert own.model.with_vocabulary(768).parameter_count == rung.parameters
    assert own.model.context_length == base.model.context_length and own.train.batch_tokens == 1024
    assert (own.train.steps, own.train.warmup_steps, own.train.lr) == (78, round(3 * 78 / 12), 0.03)


@pytest.mark.parametrize(("changes", "expected"), [
    ({"lr": None, "size": [1]}, ["steps.yaml:[0-9]+: unknown key 'size'", "'lr' is missing"]),
    ({"tokens_per_parameter": [20.0]}, ["Give tokens or tokens_per_parameter, one of them"]),
    ({"parameters": ["100k", "110k"], "tokens": ["20k"]}, ["1 different sizes", "1 different token"]),
    ({"tokens": ["2k", "40k", "80k"]}, ["2.048k tokens are fewer than 20 steps of 1,024"]),
    ({"predict": {"parameters": "3M", "tokens": "1k"}}, ["1k tokens are fewer than 20 steps"]),
    ({"tokens": None, "tokens_per_parameter": [1.0]}, ["Tokens grow in proportion to the size"]),
    ({"parameters": ["-1"], "lr": [0]}, ["parameters", "lr"]), ({"base": "nope.yaml"}, ["nope.yaml"])])
def test_what_is_wrong_with_a_file_is_named_at_once(ladder, changes, expected):
    with pytest.raises(UserError) as raised:
        rungs(ladder(**changes))
    assert [text for text in expected if not re.search(text, str(raised.value))] == [], str(raised.value)


def test_a_plan_shows_the_cost_and_starts_nothing(ladder, tmp_path, capsys):
    path = ladder()
    said = printed(capsys, main, path, "--plan")
    assert re.search(r"102\.6k +1 +64 +20\.48k, 39\.94k, 79\.87k +9 ", said)
    flops = float(re.search("28 runs, the larger training included: (.*) FLOP,", said)[1])
    assert flops == pytest.approx(9 * 140_288 * 6 / 3 * (0.1026e6 + 0.51e6 + 1.45e6) + 102_400 * 6 * 3.35e6, rel=0.25)
    assert all(len(line) <= 80 for line in said.splitlines()[:-1]) and not (tmp_path / "runs").exists()
