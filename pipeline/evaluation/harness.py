"""lm-evaluation-harness's tasks on our model. The harness alone defines what they measure.

The model is the harness's own for Hugging Face folders (HFLM), which computes with our network. HFLM tokenizes with the
exported tokenizer, cuts contexts, groups requests and scores them. The network is ours with the exported weights, so it
may be sharded over ranks, or be a training checkpoint. The harness on every rank runs as if it were alone, with the
same requests in the same order; the batches of requests are then divided among the ranks. (With the harness's own
division a rank without documents fails while others wait for it.)
"""

from __future__ import annotations

import logging
import math
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import datasets
import yaml
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor, inference_mode

from drover.model.generation.sampling import Sampling
from drover.model.generation.stream import stream
from drover.pipeline.core.console import Watch
from drover.pipeline.core.errors import UserError, listed
from drover.pipeline.core.files import named_in_errors
from drover.pipeline.evaluation.items import BITS, TaskResult, item_results, shown_name
from drover.pipeline.evaluation.open_model import OpenedModel, eos_ids, hugging_face_tokenizer, readable_bytes
from drover.pipeline.evaluation.scores import Score, scored
from drover.pipeline.evaluation.tasks import TaskFile
from drover.pipeline.parallel.ranks import ALONE, Ranks

LOGITS_IN_MEMORY = 2**27
"""Most logits of one forward pass (1 GB in float64); batches are made smaller to stay below."""
SAMPLING = ("top_p", "top_k", "min_p", "repetition_penalty")

Pair = tuple[list[int], list[int]]
"""(context ids, continuation ids)"""
Request = tuple[tuple[str, str] | None, list[int], list[int]]
"""(their texts, context ids, continuation ids)"""
FEW_SHOT_SEED = 1234
LIBRARIES = ("lm_eval", "datasets", "evaluate")
"""Their messages go to a file."""


class HarnessModel(HFLM):
    """An opened model for the harness.

    Args:
        opened: the model, and its tokenizers.
        batch: most sequences in a forward pass.
        length: tokens per forward pass; None: the model's context.
        ranks: share the work, each with the model.

    Attributes:
        truncated: how many contexts were too long and lost their beginning.
        watch: as of `Placed.divide`.

    Raises:
        UserError: the length is more than the model's context.
    """

    def __init__(self, opened: OpenedModel, *, batch: int, length: int | None = None, ranks: Ranks = ALONE) -> None:
        context = opened.config.context_length
        if length is not None and length > context:
            raise UserError(f"Windows of {length} tokens are more than the model's context of {context}.")
        self.opened = opened
        self.ranks = ranks
        self.truncated = 0
        self.watch: Watch = iter
        self._ends = eos_ids(opened)
        described = SimpleNamespace(device=opened.device, config=None)
        tokenizer = hugging_face_tokenizer(opened.tokenizer_folder)
        with messages_in(Path(os.devnull)):  # it warns that the model is not one of transformers
            super().__init__(cast(Any, described), "causal", tokenizer=tokenizer, max_length=length or context,
                             batch_size=batch, softmax_dtype="float64")

    @inference_mode()
    def _model_call(self, inps: Tensor, *_: Any, **__: Any) -> Tensor:
        return self.opened.model(inps.to(self.opened.device))

    def _loglikelihood_tokens(self, requests: Sequence[Request], disable_tqdm: bool = True,
                              override_bs: int | None = None) -> list[tuple[float, bool]]:
        pairs = [(context, continuation) for _, context, continuation in requests]
        if (longest := max((len(answer) for _, answer in pairs), default=0)) > self.max_length:
            raise UserError(f"A task asks for the probability of an answer of {longest} tokens, but the model takes "
                            f"{self.max_length}. Use a task with shorter answers.")
        self.truncated += sum(len(context) + len(answer) > self.max_length + 1 for context, answer in pairs)
        # The same order as in HFLM: the longest first, and those that differ in their last token together.
        order = sorted(range(len(pairs)), key=lambda number: (
            -sum(map(len, pairs[number])), [*pairs[number][0], *pairs[number][1]]))
        batches = list[list[int]]()
        start = 0
        while start < len(order):
            size = LOGITS_IN_MEMORY // (sum(map(len, pairs[order[start]])) * len(self.tokenizer))
            batches.append(order[start:start + max(1, min(self.batch_size, size))])
            start += len(batches[-1])
        score = super()._loglikelihood_tokens
        scored = self.opened.placed.divide(
            self.ranks, batches, lambda batch: score([requests[number] for number in batch], True), self.watch)
        result = dict(zip(order, chain.from_iterable(scored), strict=True))
        return [result[number] for number in range(len(pairs))]

    def _encode_pair(self, context: str, continuation: str) -> Pair:
        """Ids of both. If a token crosses the cut, each is encoded by itself: otherwise the harness would score too few
        tokens of the continuation, or none, which beats every other choice."""
        before, after = super()._encode_pair(context, continuation)
        if not after or self.tok_encode(context + continuation)[:len(before)] != before:
            blank = context[len(context.rstrip()):]
            before = self.tok_encode(context.rstrip())
            after = self.tok_encode(blank + continuation, add_special_tokens=False)
        return before, after

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
        """Log-probability in nats of each whole text, every token predicted once; long texts in windows. HFLM would
        also predict the BOS that the tokenizer adds."""
        return self.summed([[make_disjoint_window(pair) for pair in get_rolling_token_windows(
            self.tok_encode(request.args[0], add_special_tokens=False), self.prefix_token_id, self.max_length,
            context_len=1)] for request in requests])

    def summed(self, windows: Sequence[list[Pair]]) -> list[float]:
        """Log-probability of each text, given as windows (context, continuation); all texts' windows share batches."""
        scored = iter(self._loglikelihood_tokens([(None, *pair) for text in windows for pair in text]))
        return [sum(next(scored)[0] for _ in text) for text in windows]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        """The model's continuation of each context, up to the first stop string. Request i uses seed i."""
        work = [self._prompt(seed, *request.args) for seed, request in enumerate(requests)]
        batches = [work[start:start + self.batch_size] for start in range(0, len(work), self.batch_size)]
        return [text for texts in self.opened.placed.divide(self.ranks, batches, self._continued, self.watch)
                for text in texts]

    def _prompt(self, seed: int, context: str, settings: dict[str, Any]) -> tuple[list[int], Sampling]:
        """A context's ids, without their beginning if the new tokens need the room, and how the task samples."""
        how = normalize_gen_kwargs(settings, self.max_gen_toks)
        new = max(1, min(how["max_gen_toks"], self.max_length // 2))
        ids = self.tok_encode(context)
        room = self.max_length - new
        self.truncated += len(ids) > room
        return ids[-room:], Sampling(
            max_tokens=new, seed=seed, stop_ids=self._ends, temperature=how.get("temperature", 0.0),
            stop=tuple(filter(None, how["until"])),
            **{name: how[name] for name in SAMPLING if how.get(name)})  # other libraries use 0 for none

    def _continued(self, prompts: Sequence[tuple[list[int], Sampling]]) -> list[str]:
        """The model's continuations of one batch of prompts."""
        texts = [""] * len(prompts)
        for piece in stream(self.opened.model, readable_bytes(self.opened.tokenizer), [ids for ids, _ in prompts],
                            [sampling for _, sampling in prompts]):
            texts[piece.number] += piece.text
        return texts


def measure_task(model: HarnessModel, task_file: TaskFile, limit: int | None, bootstrap_iters: int,
                 log: Path) -> TaskResult:
    """A task's results: rank 0's, on every rank.

    Args:
        model: divides its requests among the ranks; every rank measures the same tasks in the same order.
        limit: items; None: all.
        bootstrap_iters: resamples of bootstrapped standard errors, as the harness takes it.
        log: the harness's output and messages on rank 0 are appended to this file.

    Raises:
        UserError: the task cannot be loaded or scored; one sentence, on every rank. The traceback is in the log.
    """
    result = None
    problem = None
    is_rank_zero = model.ranks.is_rank_zero
    try:
        with messages_in(log if is_rank_zero else Path(os.devnull)):
            # Only one rank needs standard errors, whose bootstrap takes a while.
            result = _measured(model, task_file, limit, bootstrap_iters if is_rank_zero else 0)
    except Exception as error:  # the harness or a task's own code may raise anything for the user's files
        if model.opened.placed.broken:
            raise
        problem = _reason(error)
    outcomes = model.ranks.gather((result if is_rank_zero else None, problem))
    for _, reason in outcomes:
        if reason is not None:
            raise UserError(f"The task {task_file.name} ({task_file.path}) failed: {reason}")
    return outcomes[0][0]


def _measured(model: HarnessModel, task_file: TaskFile, limit: int | None, bootstrap_iters: int) -> TaskResult:
    name = task_file.name
    truncated = model.truncated
    with tempfile.TemporaryDirectory(prefix="drover-tasks-") as folder:
        if problems := [*task_file.problems()]:
            raise UserError(listed(problems))
        try:
            task = load_task(task_file, Path(folder))
        except Exception as error:
            raise UserError(f"it cannot be loaded: {_reason(error)} Check its settings and data files.") from error
        failed = dict[str, str]()
        aggregation = task.aggregation()
        task.aggregation = lambda: {metric: _Guarded(own, metric, failed) for metric, own in aggregation.items()}
        measured = evaluate(model, {"tasks": {name: task}}, limit=limit, log_samples=True,
                            bootstrap_iters=bootstrap_iters)
        items = item_results(task, measured["samples"][name])
    metrics = _metrics(measured["results"][name], failed)
    if bootstrap_iters and BITS in metrics:  # for which the harness computes none
        metrics[BITS]["stderr"] = scored(items["per_item"]["metrics"][BITS])["stderr"]
    counts = measured["n-samples"][name]
    result: TaskResult = {
        "metrics": metrics, "items": counts["effective"], "items_in_file": counts["original"],
        "few_shot": measured["n-shot"][name], "kind": task.OUTPUT_TYPE, "version": str(measured["versions"][name]),
        "contexts_truncated": model.truncated - truncated, "without_value": failed, **items}
    if task_file.source:
        result["data"] = task_file.source
    return result


def load_task(task_file: TaskFile, folder: Path) -> Any:
    """The harness's task object. Its data is read from absolute paths (the harness resolves them in the working
    directory, not next to the task) into our own cache in the folder."""
    datasets.disable_progress_bars()
    (folder / "task.yaml").write_text(yaml.safe_dump({
        "include": str(task_file.path.absolute()), **task_file.overrides, "task": task_file.name,
        **task_file.loading(folder / "cache")}), encoding="utf-8")
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    task = manager.load([task_file.name])["tasks"][task_file.name]
    if task.get_config("num_fewshot") is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=FEW_SHOT_SEED)
    return task


@contextmanager
def messages_in(log: Path) -> Iterator[None]:
    """Append output, messages of the LIBRARIES and the traceback of an error to a file."""
    with named_in_errors(log), open(log, "a", encoding="utf-8") as file, redirect_stdout(file), redirect_stderr(file):
        handler = logging.StreamHandler(file)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        loggers = [logging.getLogger(name) for name in LIBRARIES]
        for logger in loggers:
            logger.setLevel(logging.INFO)
            logger.propagate, logger.handlers = False, [handler]
        try:
            yield
        except Exception:
            traceback.print_exc()
            raise
        finally:
            for logger in loggers:
                logger.propagate, logger.handlers = True, []


def _reason(error: Exception) -> str:
    """An error in one sentence: the first line of its message, after its type unless that is our own."""
    if isinstance(error, UserError):
        return str(error)
    lines = str(error).strip().splitlines()
    return f"{': '.join([type(error).__name__, *lines[:1]]).rstrip('.')}."


class _Guarded:
    """An aggregation of a metric, which gives NaN where it fails, so that the others have values. `failed` gets the
    reason, by the metric's name.

    It equals the function that it guards, by which the harness finds how to compute the standard error; once it has
    failed it equals nothing, and there is none.
    """

    def __init__(self, function: Callable[[Any], Any], name: str, failed: dict[str, str]) -> None:
        self.function, self.name, self.failed = function, name, failed
        self.__name__ = getattr(function, "__name__", name)

    def __call__(self, values: Any) -> Any:
        try:
            return self.function(values)
        except Exception as error:  # noqa: BLE001 - a task's own code may raise anything
            traceback.print_exc()  # into the log
            self.failed[self.name] = _reason(error)
            return math.nan

    def __eq__(self, other: object) -> bool:
        return self.name not in self.failed and self.function == other

    def __hash__(self) -> int:
        return hash(self.function)


def _metrics(results: Mapping[str, Any], failed: dict[str, str]) -> dict[str, Score]:
    """Each metric's value and standard error, from the harness's `metric,filter` and `metric_stderr,filter`.
    Values that are no finite numbers, as of metrics that failed, are None; `failed` gets a reason for each."""
    metrics = dict[str, Score]()
    for key, value in results.items():
        metric, comma, filter_name = key.partition(",")
        if not comma or metric.endswith("_stderr"):
            continue
        shown = shown_name(metric, filter_name)
        known = _is_finite(value)
        error = results.get(f"{metric}_stderr,{filter_name}", math.nan)
        if not known and metric not in failed:
            failed[shown] = f"it is {str(value)[:80]}."
        metrics[shown] = {"value": float(value) if known else None,
                          "stderr": float(error) if known and _is_finite(error) else None}
    return metrics


def _is_finite(value: Any) -> bool:
    """A task's own aggregation may return anything."""
    return isinstance(value, (int, float)) and math.isfinite(value)
