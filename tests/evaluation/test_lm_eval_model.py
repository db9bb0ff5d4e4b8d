"""`--model drover`: the harness's figures of our model are those of transformers on the export, to the last digit."""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import DEFAULT, Mock

import pytest
import torch
from lm_eval.api.model import CachingLM
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.utils import handle_stop_sequences
from lm_eval.tasks import TaskManager

import drover.pipeline.evaluation.lm_eval_model  # noqa: F401 - registers `drover`
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import read_json, write_json
from drover.pipeline.evaluation.lm_eval_model import DroverModel
from drover.pipeline.evaluation.tasks import find_tasks, write_absolute
from drover.pipeline.tokenization.simple import ByteTokenizer
from drover.tools.lm_eval import main
from tests.evaluation.test_task_packs import write_pack
from tests.refusal import printed, refused, table
from tests.tiny_models import for_tokenizer, write_huggingface, write_run

needs_accelerate = pytest.mark.skipif(find_spec("accelerate") is None,
                                      reason="the harness's own `--model hf` needs accelerate: pip install -e '.[dev]'")
TOKENIZER = ByteTokenizer()
SCORED, TEXTS = ["capitals", "endings", "sums", "capitals_2shot"], ["pages"]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A run with checkpoints 2 and 7, the export of the last, and the README's tasks."""
    folder = tmp_path_factory.mktemp("home")
    models = {step: for_tokenizer(TOKENIZER, seed=step, context_length=512) for step in (2, 7)}
    write_run(folder / "run", models, TOKENIZER, evaluate={"sequence_length": 256, "batch": 3})
    write_huggingface(folder / "hf", models[7], TOKENIZER)
    (folder / "absolute").mkdir()
    write_absolute(find_tasks([write_pack(folder / "tasks")]).values(), folder / "absolute")
    return folder


def measured(home, tasks, model, **arguments):
    """What was written for the task `sums`, and all that lm_eval returns."""
    found = simple_evaluate(
        model=model, tasks=tasks, device="cpu", bootstrap_iters=20,
        model_args={key: str(value) if isinstance(value, Path) else value for key, value in arguments.items()},
        task_manager=TaskManager(include_path=str(home / "absolute"), include_defaults=False))
    written = {task: [sample["resps"] for sample in found["samples"][task]] for task in tasks if task == "sums"}
    return written, found


@needs_accelerate
@pytest.mark.parametrize(("tasks", "more"), [(SCORED, {}), (TEXTS, {"add_bos_token": False})], ids=["scored", "texts"])
def test_the_figures_are_those_of_hf_on_the_export(home, tasks, more):
    """Every printed digit, and everything that was written."""
    theirs = measured(home, tasks, "hf", pretrained=home / "hf", dtype="float32", max_length=256, **more)
    ours = measured(home, tasks, "drover", run=home / "run", checkpoint=7)
    assert ours[0] == theirs[0]
    figures = [(task, metric, value) for task, metrics in theirs[1]["results"].items()
               for metric, value in metrics.items() if isinstance(value, float)]
    assert len(figures) >= 3
    for task, metric, value in figures:
        same(ours[1]["results"][task][metric], value)


def same(found, expected):
    """Equal to every digit that the harness prints. The perplexity of a word, which of a random model has ten digits
    before the point and more, to those that float32 has."""
    assert found == pytest.approx(expected, rel=1e-4)
    if expected < 1000:
        assert f"{found:.4f}" == f"{expected:.4f}"


def test_a_run_gives_its_settings_and_arguments_go_before(home):
    model = DroverModel(run=str(home / "run"), checkpoint="newest", device="cpu")
    assert (model.length, model.batch, model.path.name) == (256, 3, "step-00000007")
    model = DroverModel(run=str(home / "run"), checkpoint=2, batch=5, max_length=100, dtype="bfloat16", device="cpu",
                        batch_size="auto")
    assert (model.length, model.batch, model.path.name) == (100, 5, "step-00000002")
    assert {parameter.dtype for parameter in model.model.parameters()} == {torch.bfloat16}
    assert DroverModel(run=str(home / "hf"), device="cpu", batch_size=7).batch == 7


@pytest.mark.parametrize(("arguments", "message"), table("""
    {} -> run= is missing
    {"run": "run", "pretrained": "x"} -> and not pretrained
    {"run": "run", "checkpoint": 3} -> no checkpoint after step 3
    {"run": "run", "checkpoint": "last"} -> neither
    {"run": "hf", "checkpoint": 2} -> needs run= to be the folder of a run
    {"run": "run", "dtype": "float16"} -> float32 or bfloat16
    {"run": "run", "max_length": 513} -> context of 512
    {"run": "nowhere"} -> is no folder""", json.loads))
def test_what_is_not_there_is_said(home, arguments, message):
    refused(UserError, message, DroverModel,
            **{**arguments, **({"run": str(home / arguments["run"])} if "run" in arguments else {})})


@pytest.mark.parametrize(("asking", "answering", "requests"), [
    ("loglikelihood", "_score", [(f"{number} is", " less") for number in range(6)]),
    ("generate_until", "_write", [(f"{number}", {"until": ["x"], "max_gen_toks": 3}) for number in range(6)])])
def test_an_interrupted_command_goes_on(home, tmp_path, monkeypatch, asking, answering, requests):
    """The harness's cache has every batch that was answered before the kill; the rest alone is asked for again."""
    model = DroverModel(run=str(home / "run"), batch=1, device="cpu")
    asked = [SimpleNamespace(args=arguments) for arguments in requests]
    expected = getattr(model, asking)(asked)
    answer = Mock(wraps=getattr(model, answering), side_effect=[DEFAULT] * 3 + [KeyboardInterrupt] + [DEFAULT] * 3)
    monkeypatch.setattr(model, answering, answer)
    kept = CachingLM(model, str(tmp_path / "cache.db"))
    with pytest.raises(KeyboardInterrupt):
        getattr(kept, asking)(asked)
    assert getattr(kept, asking)(asked) == expected and answer.call_count == 7, "none of them answered twice"


def test_texts_do_not_depend_on_the_batch(home):
    """Greedy and drawn: request i draws with seed i, alone or among others, whatever their lengths."""
    asked = [SimpleNamespace(args=("a" * number, {"max_gen_toks": 9, "do_sample": number < 3, "temperature": 1.0}))
             for number in (1, 9, 2, 30, 4)]
    found = [DroverModel(run=str(home / "run"), batch=batch, device="cpu").generate_until(asked) for batch in (1, 2, 5)]
    assert found[0] == found[1] == found[2] and len(set(found[0])) > 1
    assert handle_stop_sequences(None, eos=None) == [], "no stopping text is no stopping text"


@pytest.mark.parametrize("where", [("generation_config.json",), ("config.json",), ("config.json", "nothing")])
def test_a_text_ends_at_every_id_that_the_model_names(home, tmp_path, where):
    """In generation_config.json, or in config.json, with or without other generation settings."""
    folder = shutil.copytree(home / "hf", tmp_path / "hf")
    asked = [SimpleNamespace(args=("import", {"max_gen_toks": 24, "until": []}))]
    whole, = DroverModel(run=str(folder), device="cpu").generate_until(asked)
    end = next(character for character in whole[2:] if character.isascii())
    if where != ("generation_config.json",):
        (folder / "generation_config.json").unlink()
    if where[1:]:
        write_json(folder / "generation_config.json", {"temperature": 0.6})
    path = folder / where[0]
    write_json(path, {**read_json(path), "eos_token_id": [TOKENIZER.eos_id, *TOKENIZER.encode(end)]})
    assert DroverModel(run=str(folder), device="cpu").generate_until(asked) == [whole.partition(end)[0]]


def test_the_command_line_is_lm_evals_own(home, monkeypatch, capsys):
    """Data files are found beside the task although the command is given elsewhere."""
    import lm_eval.tasks
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", lambda **more: TaskManager(**more, include_defaults=False))
    monkeypatch.chdir(home)
    assert main(["--model", "drover", "--model_args", "run=run,checkpoint=2", "--tasks", "capitals", "--include_path",
                 "tasks", "--device", "cpu", "--output_path", "out.json"]) == 0
    shown = capsys.readouterr().out
    assert "|capitals|" in shown and "drover ({'run': 'run', 'checkpoint': 2})" in shown
    saved = json.loads(next(home.glob("out*.json")).read_text())
    assert saved["results"]["capitals"]["acc,none"] * 3 in (0, 1, 2, 3)
    assert "nowhere is no folder" in printed(capsys, main, "--model", "drover", "--model_args", "run=nowhere",
                                             "--tasks", "capitals", "--include_path", "tasks", expect=2)


def test_a_cache_is_for_one_process(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "different requests" in printed(capsys, main, "--model", "drover", "--use_cache", "x", "--tasks", "y",
                                           expect=2)
