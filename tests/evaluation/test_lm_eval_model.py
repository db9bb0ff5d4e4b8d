"""`--model drover`: the harness's figures of our model are those of transformers on the export, to the last digit."""

import json
import math
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lm_eval.api.model import LM, CachingLM
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.utils import handle_stop_sequences
from lm_eval.tasks import TaskManager

import pipeline.evaluation.lm_eval_model  # noqa: F401 - registers `drover`
from pipeline.errors import UserError
from pipeline.evaluation.harness import HarnessModel
from pipeline.evaluation.lm_eval_model import DroverModel
from pipeline.evaluation.tasks import find_tasks, write_absolute
from pipeline.tokenization.simple import ByteTokenizer
from tests.evaluation.test_task_packs import FILES
from tests.tiny_models import for_tokenizer, write_huggingface, write_run
from tools.lm_eval import main

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
    (folder / "tasks").mkdir()
    for name, text in FILES.items():
        (folder / "tasks" / name).write_text(text, encoding="utf-8")
    (folder / "absolute").mkdir()
    write_absolute(folder / "tasks", folder / "absolute")
    return folder


class ByTransformers(LM):
    """The export in transformers, as simply as it can be asked: each text alone."""

    def __init__(self, folder):
        super().__init__()
        from transformers import AutoModelForCausalLM, AutoTokenizer
        self.network = AutoModelForCausalLM.from_pretrained(folder).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def scored(self, context, whole):
        start = len(self.tokenizer(context).input_ids)
        ids = self.tokenizer(whole, return_tensors="pt").input_ids
        with torch.inference_mode():
            scores = self.network(ids[:, :-1]).logits.double().log_softmax(-1)[0, start - 1:]
        wanted = ids[0, start:]
        return float(scores.gather(-1, wanted[:, None]).sum()), bool((scores.argmax(-1) == wanted).all())

    def loglikelihood(self, requests, disable_tqdm=False):
        return [self.scored(context, context + ending) for context, ending in (one.args for one in requests)]

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        return [self.scored("", request.args[0])[0] for request in requests]

    def generate_until(self, requests, disable_tqdm=False):
        found = []
        for context, settings in (request.args for request in requests):
            ids = self.tokenizer(context, return_tensors="pt")
            new = self.network.generate(**ids, max_new_tokens=settings["max_gen_toks"], do_sample=False,
                                        eos_token_id=TOKENIZER.eos_id, pad_token_id=TOKENIZER.eos_id)
            text = self.tokenizer.decode(new[0, ids.input_ids.shape[1]:], skip_special_tokens=True)
            found.append(text.split(settings["until"][0])[0])
        return found


def measured(home, tasks, model, **arguments):
    """What was written for the task `sums`, and all that lm_eval returns."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DISABLE_MULTIPROC", "1")  # the harness's bootstrap; the same draws
        found = simple_evaluate(
            model=model, tasks=tasks, device="cpu", bootstrap_iters=20,
            model_args={key: str(value) if isinstance(value, Path) else value for key, value in arguments.items()},
            task_manager=TaskManager(include_path=str(home / "absolute"), include_defaults=False))
    written = {task: [sample["resps"] for sample in found["samples"][task]] for task in tasks if task == "sums"}
    return written, found


@pytest.fixture(scope="module")
def ours(home):
    return measured(home, SCORED + TEXTS, "drover", run=home / "run", checkpoint="newest", batch=2)


@needs_accelerate
@pytest.mark.parametrize(("tasks", "more"), [(SCORED, {}), (TEXTS, {"add_bos_token": False})], ids=["scored", "texts"])
def test_the_figures_are_those_of_hf_on_the_export(home, tasks, more):
    """Every printed digit, and everything that was written; from the run's checkpoint and from the folder itself."""
    theirs = measured(home, tasks, "hf", pretrained=home / "hf", dtype="float32", max_length=256, **more)
    agree(theirs, measured(home, tasks, "drover", run=home / "run", checkpoint=7))
    agree(theirs, measured(home, tasks, "drover", run=home / "hf", batch=5))


def test_the_figures_are_those_of_transformers_on_the_export(home, ours):
    agree(measured(home, SCORED + TEXTS, ByTransformers(home / "hf")), ours)


def agree(theirs, found):
    """Each figure, and all of what was written."""
    written, results = found
    assert written == theirs[0]
    compared = 0
    for task, metrics in theirs[1]["results"].items():
        for metric, value in metrics.items():
            if isinstance(value, float):
                compared += 1
                same(results["results"][task][metric], value)
    assert compared >= 3


def same(found, expected):
    """Equal to every digit that the harness prints. The perplexity of a word, which of a random model has ten digits
    before the point and more, to those that float32 has."""
    assert found == pytest.approx(expected, rel=1e-4)
    if expected < 1000:
        assert f"{found:.4f}" == f"{expected:.4f}"


def test_the_figures_are_those_of_the_stage(home, ours):
    """The runner that the stage has, on the same weights."""
    from pipeline.evaluation.open_model import open_model
    from pipeline.evaluation.running import TaskRunner
    opened = open_model(home / "run", torch.device("cpu"), torch.float32)
    harness = HarnessModel(opened.model, opened.tokenizer, batch=16, length=256)
    with pytest.MonkeyPatch.context() as patch, TaskRunner(harness, [home / "tasks"], None, 20) as runner:
        patch.setenv("DISABLE_MULTIPROC", "1")
        for name, task in find_tasks([home / "tasks"]).items():
            for metric, entry in runner.measure(task)["metrics"].items():
                key = metric.replace(" (stripped)", ",stripped") if "(" in metric else f"{metric},none"
                same(entry["value"], ours[1]["results"][name][key])


def test_a_run_gives_its_settings_and_arguments_go_before(home):
    model = DroverModel(run=str(home / "run"), device="cpu")
    assert (model.length, model.batch, model.path.name) == (256, 3, "step-00000007")
    model = DroverModel(run=str(home / "run"), checkpoint=2, batch=5, max_length=100, dtype="bfloat16", device="cpu",
                        batch_size="auto")
    assert (model.length, model.batch, model.path.name) == (100, 5, "step-00000002")
    assert {parameter.dtype for parameter in model.model.parameters()} == {torch.bfloat16}
    assert DroverModel(run=str(home / "hf"), device="cpu", batch_size=7).batch == 7


@pytest.mark.parametrize(("arguments", "message"), [
    ({}, "run= is missing"), ({"run": "run", "pretrained": "x"}, "and not pretrained"),
    ({"run": "run", "checkpoint": 3}, "no checkpoint after step 3"), ({"run": "run", "checkpoint": "last"}, "neither"),
    ({"run": "hf", "checkpoint": 2}, "needs run= to be the folder of a run"),
    ({"run": "run", "dtype": "float16"}, "float32 or bfloat16"), ({"run": "run", "max_length": 513}, "context of 512"),
    ({"run": "nowhere"}, "is no folder")])
def test_what_is_not_there_is_said(home, arguments, message):
    with pytest.raises(UserError, match=message):
        DroverModel(**{**arguments, **({"run": str(home / arguments["run"])} if "run" in arguments else {})})


@needs_accelerate
def test_whole_texts_by_hf_count_the_bos_that_its_tokenizer_adds(home):
    """The difference that docs/evaluation.md explains: it predicts BOS from BOS, and the text after both."""
    value = {more: measured(home, TEXTS, "hf", pretrained=home / "hf", dtype="float32", max_length=256,
                            **dict(more))[1]["samples"]["pages"] for more in ((), (("add_bos_token", False),))}
    with_bos, without = (samples[0]["bits_per_byte"][0] for samples in value.values())
    bos = TOKENIZER.bos_id
    ids = torch.tensor([[bos, bos, *TOKENIZER.encode(value[()][0]["doc"]["page"])]])
    model = for_tokenizer(TOKENIZER, seed=7, context_length=512)
    scores = model(ids[:, :-1]).double().log_softmax(-1)[0]
    assert with_bos == pytest.approx(float(scores.gather(-1, ids[0, 1:, None]).sum()), rel=1e-5)
    assert abs(with_bos - without) > 0.01


def test_an_interrupted_command_goes_on(home, monkeypatch):
    """The harness's cache has every batch that was answered before the kill; the rest alone is asked for again."""
    model = DroverModel(run=str(home / "run"), batch=1, device="cpu")
    asked = [SimpleNamespace(args=(f"{number} is", " less")) for number in range(6)]
    texts = [SimpleNamespace(args=(f"{number}", {"until": ["x"], "max_gen_toks": 3})) for number in range(4)]
    expected = model.loglikelihood(asked), model.generate_until(texts)
    kept = CachingLM(model, str(home / "cache.db"))
    answered = {"_score": 0, "_write": 0}

    def dies(name, function):
        def counting(*arguments):
            if answered[name] == 3 and name not in killed:
                killed.add(name)
                raise KeyboardInterrupt
            answered[name] += 1
            return function(*arguments)
        return counting
    killed = set()
    for name in answered:
        monkeypatch.setattr(model, name, dies(name, getattr(model, name)))
    with pytest.raises(KeyboardInterrupt):
        kept.loglikelihood(asked)
    assert kept.loglikelihood(asked) == expected[0]
    with pytest.raises(KeyboardInterrupt):
        kept.generate_until(texts)
    assert kept.generate_until(texts) == expected[1]
    assert answered == {"_score": 6, "_write": 4}, "none of them twice"


def test_texts_do_not_depend_on_the_batch(home):
    """Greedy and drawn: request i draws with seed i, alone or among others, whatever their lengths."""
    asked = [SimpleNamespace(args=("a" * number, {"max_gen_toks": 9, "do_sample": number < 3, "temperature": 1.0}))
             for number in (1, 9, 2, 30, 4)]
    found = [DroverModel(run=str(home / "run"), batch=batch, device="cpu").generate_until(asked) for batch in (1, 2, 5)]
    assert found[0] == found[1] == found[2] and len(set(found[0])) > 1
    assert handle_stop_sequences(None, eos=None) == [], "no stopping text is no stopping text"


def test_the_command_line_is_lm_evals_own(home, monkeypatch, capsys):
    """Data files are found beside the task although the command is given elsewhere."""
    import lm_eval.tasks
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", lambda **more: TaskManager(**more, include_defaults=False))
    monkeypatch.setenv("DISABLE_MULTIPROC", "1")
    monkeypatch.chdir(home)
    assert main(["--model", "drover", "--model_args", "run=run,checkpoint=2", "--tasks", "capitals", "--include_path",
                 "tasks", "--device", "cpu", "--output_path", "out.json"]) == 0
    shown = capsys.readouterr().out
    assert "|capitals|" in shown and "drover ({'run': 'run', 'checkpoint': 2})" in shown
    saved = json.loads(next(home.glob("out*.json")).read_text())
    found = saved["results"]["capitals"]["acc,none"]
    assert found in (0, pytest.approx(1 / 3), pytest.approx(2 / 3), 1) and not math.isnan(found)
    assert main(["--model", "drover", "--model_args", "run=nowhere", "--tasks", "capitals", "--include_path",
                 "tasks"]) == 2
    assert "nowhere is no folder" in capsys.readouterr().err


def test_a_cache_is_for_one_process(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["--model", "drover", "--use_cache", "x", "--tasks", "y"]) == 2
    assert "different requests" in capsys.readouterr().err
