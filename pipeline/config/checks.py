"""Combinations of settings that cannot work, each as a sentence with the numbers.

A rule is a condition and the sentence to print if it holds. In a sentence, `<train.steps>` is replaced by the setting
and its value. What concerns one setting alone is part of its type. Also which optional packages a configuration needs,
and which of them are missing.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import combinations
from operator import attrgetter
from pathlib import PurePath
from typing import Any

from drover.model.attention import BACKENDS
from drover.model.config import ModelConfig
from drover.pipeline.config.data import UINT16_IDS, WEB, file_format, web_packages
from drover.pipeline.config.kinds import source_of
from drover.pipeline.config.optimizers import optimizer_problems
from drover.pipeline.config.phases import BatchPlan, batch_problems, in_phases, plan_problems
from drover.pipeline.config.shipped import FILTERS, HOOKS, SINKS, name_of
from drover.pipeline.config.training import FIRST, ParallelConfig, mixture_problems
from drover.pipeline.config.tree import Config
from drover.pipeline.core.errors import UserError, absent, meant

SPECIAL_IDS = 256
TRAINED = ("sentencepiece", "bpe")
Rules = Iterator[tuple[Any, str]]
"""Pairs: whether it is wrong (by truth value), and the sentence."""


def problems(config: Config) -> list[str]:
    """Every impossible combination in `config`; empty if it can run."""
    wrong = [*_broken(_rules(config), config), *plan_problems(config.train), *_listed(config), *_stores(config)]
    in_phase: dict[str, str] = {}  # each where it is met first
    for phase, within in in_phases(config):
        for problem in (*_broken(_rules_of_phase(within), within), *_mixture(within)):
            in_phase.setdefault(problem, phase.prefix + problem)
    return [*wrong, *in_phase.values()]


def _broken(rules: Rules, config: Config) -> Iterator[str]:
    def shown(match: re.Match[str]) -> str:
        value = attrgetter(match[1])(config)
        return f"{match[1]} {str(value).lower() if isinstance(value, bool) else repr(value)}"

    yield from (re.sub(r"<([\w.]+)>", shown, sentence) for wrong, sentence in rules if wrong)


def rank_problems(config: Config, ranks: int) -> list[str]:
    """Combinations that cannot work on `ranks` processes."""
    if wrong := grid_problems(config.parallel, ranks):
        return wrong
    numbers = []
    for phase, within in in_phases(config):
        wrong += [phase.prefix + problem for problem in batch_problems(within.train, within.parallel, ranks)]
        numbers.append(BatchPlan.of(within.train, within.parallel, ranks).accumulation)
    if config.parallel.engine == "deepspeed" and len(set(numbers)) > 1:
        wrong.append(f"parallel.engine 'deepspeed' takes the same number of micro-batches in every step, and in "
                     f"train.phases they are {', '.join(map(str, numbers))}: set micro_batch in the phases so that "
                     f"they are equal, or take 'fsdp2'.")
    return wrong


def grid_problems(parallel: ParallelConfig, ranks: int) -> list[str]:
    """Why so many ranks cannot be laid out as the configuration says."""
    sizes = {name: getattr(parallel, name) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp")}
    rest = -1 in sizes.values()
    needed = math.prod(size for size in sizes.values() if size != -1)
    if (ranks % needed if rest else ranks - needed) == 0:
        return []
    terms = " x ".join(f"{name} {size}" for name, size in sizes.items() if size != 1)
    return [f"parallel: {terms} needs {'a multiple of ' * rest}{needed} ranks, but there are {ranks}."]


def vocabulary_size(config: Config) -> int | None:
    """Ids of the vocabulary where the configuration alone decides it, else None."""
    tokenizer = config.tokenizer
    if tokenizer.kind == "byte":
        return 256 + SPECIAL_IDS
    if tokenizer.kind in TRAINED and tokenizer.path is None:
        return tokenizer.vocab_size
    return config.model.vocab_size if tokenizer.path is not None else None


def network(config: Config) -> ModelConfig:
    """The network with its vocabulary, as far as the configuration alone decides it."""
    return config.model.with_vocabulary(vocabulary_size(config))


def _rules(config: Config) -> Rules:
    model, train, parallel, shard = config.model, config.train, config.parallel, config.shard
    context = model.context_length
    evaluate = config.evaluate
    average = config.convert.average
    yield train.sample_tokens >= context, "<train.sample_tokens> leaves no room for a prompt in <model.context_length>."
    yield (evaluate.prompt_tokens >= context,
           "<evaluate.prompt_tokens> leaves no room for a prompt in <model.context_length>.")
    yield ((evaluate.sequence_length or 0) > context,
           "<evaluate.sequence_length> is longer than <model.context_length>.")
    saved = train.checkpoint.every_steps or train.steps
    yield (evaluate.every is not None and (evaluate.every % saved or evaluate.every > train.steps),
           "<evaluate.every> is not a multiple of <train.checkpoint.every_steps> up to <train.steps>, so no checkpoint "
           "would be scored.")
    yield (train.attention not in ("auto", *BACKENDS) and ":" not in train.attention,
           f"<train.attention> is not known. Take auto, {', '.join(BACKENDS)}, or a class of your own as "
           f"module:class.")
    yield (train.decay_steps is not None and train.schedule != "wsd",
           "<train.decay_steps> is set, but <train.schedule>; it applies to 'wsd' only.")
    decay = (train.decay_steps or 0) if train.schedule == "wsd" else 0
    yield (train.warmup_steps + decay > train.steps,
           f"<train.warmup_steps>{' + <train.decay_steps>' * (decay > 0)} is more than <train.steps>. Take fewer "
           f"(train.warmup_steps={train.steps // 10}{f' train.decay_steps={train.steps // 5 or 1}' * (decay > 0)}), or "
           f"train for more steps.")
    yield (sorted(set(average)) != average or max(average, default=0) > train.steps,
           "<convert.average>: name each step once, in order, and none above <train.steps>.")
    timeout, hang = parallel.timeout_minutes, train.guards.hang_minutes
    yield (timeout is not None and hang is not None and timeout <= FIRST * hang,
           f"<parallel.timeout_minutes> is not longer than {FIRST} x <train.guards.hang_minutes>, the watchdog's limit "
           f"for a first step: ranks would end before they record where they hang. Raise it, lower hang_minutes, or "
           f"set one of them to null.")

    yield (parallel.dp_replicate == parallel.dp_shard == -1,
           "parallel.dp_replicate and parallel.dp_shard are both -1, the rest of the ranks. Give one of them a number, "
           "as in dp_replicate=-1 dp_shard=8: a replica on every 8 ranks.")
    yield (parallel.stages > model.layers,
           f"parallel: {parallel.stages} pipeline stages (<parallel.pp>, <parallel.pp_schedule>) are more than "
           f"<model.layers>.")
    deepspeed = parallel.engine == "deepspeed"
    yield not deepspeed and parallel.offload != "none", "<parallel.offload> is for parallel.engine 'deepspeed'."
    others = [f"<parallel.{key}>" for key, only in {"dp_replicate": 1, "dp_shard": -1, "tp": 1, "cp": 1, "pp": 1,
                                                    "reshard": "always", "reduce": "each"}.items()
              if getattr(parallel, key) != only]
    yield (deepspeed and others,
           f"{', '.join(others)}: for parallel.engine 'fsdp2', not 'deepspeed', which shards one replica over all "
           f"ranks. Leave them out, or take 'fsdp2'.")
    yield (deepspeed and parallel.offload == "params" and parallel.zero_stage != 3,
           "<parallel.offload> needs stage 3, not <parallel.zero_stage>: in lower stages every rank needs all weights.")
    yield (deepspeed and parallel.zero_stage == 3 and train.compile,
           "<train.compile> does not work with <parallel.zero_stage>, whose hooks break every graph; set compile to "
           "null or false, or take stage 2 or fsdp2.")
    yield (deepspeed and train.precision in ("fp64", "fp8"),
           "<train.precision> needs parallel.engine 'fsdp2': DeepSpeed computes in fp32 or bf16.")

    tokenizer = config.tokenizer
    known = vocabulary_size(config) or 0
    kind = tokenizer.kind
    given = tokenizer.path is not None
    yield (kind in ("tiktoken", "huggingface") and not given,
           "<tokenizer.kind> needs tokenizer.path: it is read from a file, not trained.")
    yield (kind in ("bpe", "byte", "char") and given,
           "tokenizer.path is set, but <tokenizer.kind> takes no file; a file of ranks like Llama 3's is of kind "
           "tiktoken.")
    yield (config.encode.sources and not given and kind != "byte",
           "encode.sources are ids of a tokenizer that exists, but <tokenizer.path>: a vocabulary that is trained here "
           "would give the ids another meaning. Name their tokenizer there.")
    yield not config.source_names, "shard.sources and encode.sources are both empty. Give the run text or tokens."
    yield (kind in TRAINED and not given and (tokenizer.vocab_size % 128 or tokenizer.vocab_size < 640),
           f"<tokenizer.vocab_size> is not a multiple of 128 that has room for 256 special ids and 256 bytes; nearest: "
           f"{max(5, round(tokenizer.vocab_size / 128)) * 128}.")
    yield (kind == "bpe" and tokenizer.train_mb > 2000,
           "<tokenizer.train_mb> is more than the trainer of bpe can count; 2000 is enough for any vocabulary.")
    yield (config.encode.dtype == "uint16" and known > UINT16_IDS,
           f"<encode.dtype> holds ids up to {UINT16_IDS - 1}, but the vocabulary of the tokenizer has {known}; take "
           f"uint32 or auto.")
    yield (model.vocab_size or known) < known, f"<model.vocab_size> is smaller than the tokenizer's {known}."
    yield (shard.near_duplicates is not None and not shard.drop_duplicates,
           "shard.near_duplicates drops near-duplicates, but shard.drop_duplicates is false, which keeps exact "
           "duplicates. Set shard.drop_duplicates to true, or shard.near_duplicates to null.")


def _rules_of_phase(config: Config) -> Rules:
    """Rules for settings that each phase may have for itself."""
    train, model, parallel = config.train, config.model, config.parallel
    length, tp, cp = train.sequence_length, parallel.tp, parallel.cp
    yield length > model.context_length, "<train.sequence_length> is longer than <model.context_length>."
    yield (train.batch_tokens % length,
           f"<train.batch_tokens> is not a multiple of <train.sequence_length>; nearest: "
           f"{max(1, round(train.batch_tokens / length)) * length}.")
    for key in ("model.heads", "model.kv_heads", "model.context_length", "train.sequence_length"):
        yield attrgetter(key)(config) % tp, f"<{key}> is not divisible by <parallel.tp>."
    vocabulary = model.vocab_size or vocabulary_size(config) or 0
    yield model.hidden % tp, f"the feed-forward width of the model, {model.hidden}, is not divisible by <parallel.tp>."
    yield vocabulary % tp, f"the vocabulary of the model or tokenizer, {vocabulary}, is not divisible by <parallel.tp>."
    yield (cp > 1 and length % (cp * tp) and not length % tp,
           f"<train.sequence_length> is not divisible by {cp * tp} (<parallel.cp> x <parallel.tp>).")
    yield (train.precision == "fp8" and length % (16 * cp),
           "<train.sequence_length> is not a multiple of 16 x <parallel.cp>, which <train.precision> needs: the "
           "weight gradients are matrix products over the tokens of a rank.")


def _listed(config: Config) -> Iterator[str]:
    """Problems of single items of lists and mappings."""
    train, sources = config.train, config.source_names
    yield from (f"model: {problem}" for problem in config.model.problems())
    yield from optimizer_problems(train, config.parallel.engine)
    filters = ["duplicate", "empty", "low_score", *map(name_of, config.shard.filters)]  # names of counts
    for key, what, names, remedy in (
            ("shard.sources" + " with encode.sources" * bool(config.encode.sources), "sources named", sources, ""),
            ("shard.filters", "filters named", filters, " Give one a `name` of its own."),
            ("train.log_to", "sinks of kind", [sink.kind for sink in train.log_to], "")):
        yield from (f"{key} has {count} {what} '{name}'; there can be one.{remedy}"
                    for name, count in Counter(names).items() if count > 1)
    for name, keep in config.shard.best_shares.items():
        yield from _no_field(config, name, keep.by, f"shard.sources: {name} keeps documents by",
                             "or a classifier to shard.filters")
    for item in config.shard.filters:
        for source in config.shard.sources if item.kind == "site" else ():
            judged: Any = item
            formats = {file_format(PurePath(path), getattr(source, "format", "auto"))
                       for path in getattr(source, "paths", ())}
            is_web = formats & {*WEB, None} or getattr(source, "html", "") == "fields"
            if source.name in (judged.sources or [source.name]) and not is_web:
                yield from _no_field(config, source.name, judged.field,
                                     f"shard.filters: {name_of(item)} judges {source.name} by",
                                     "or name other sources in the filter's `sources`")
        yield from _no_sources(f"shard.filters: the filter {name_of(item)}", getattr(item, "sources", None),
                               config.shard.source_names)
    yield from _no_sources("train.max_epochs", train.max_epochs, sources)


def _no_field(config: Config, source: str, field: str, what: str, remedy: str) -> Iterator[str]:
    """A sentence if the documents of a source do not have a field. what: is done by it. remedy: another one than to
    keep the field."""
    filters = [item for item in config.shard.filters if source in (getattr(item, "sources", None) or [source])]
    known = [name for own in config.shard.sources if own.name == source for name in getattr(own, "meta_fields", ())]
    known += [item.score_field for item in filters if hasattr(item, "score_field")]
    if field not in known and not any(":" in item.kind for item in filters):
        yield (f"{what} {field}, a field that its documents do not have; "
               f"{meant(field, known, f'add it to meta_fields of the source, {remedy}.')}")


def _mixture(config: Config) -> Iterator[str]:
    mixture, sources = config.train.mixture, config.source_names
    if mixture is None:
        return
    if sum(mixture.values()) > 0:
        yield from mixture_problems(mixture)
    else:
        yield f"train.mixture needs shares with a sum above 0, not {mixture}."
    yield from _no_sources("train.mixture", mixture, sources)
    if missing := sorted({*sources} - {*mixture}):
        yield f"train.mixture lacks {', '.join(missing)} of the sources; write 0 to leave one out."


def _no_sources(key: str, named: Any, sources: Iterable[str]) -> Iterator[str]:
    """named: a list or mapping of names, if anything else is not one of names."""
    if isinstance(named, list | dict) and (unknown := sorted({*map(str, named)} - {*sources})):
        yield f"{key} names {', '.join(unknown)}, but the sources are {', '.join(sources)}."


def _stores(config: Config) -> Iterator[str]:
    """Uploads of different things need separate places."""
    keys = ("encode.copy_to", "train.checkpoint.copy_to", "convert.copy_to")
    urls = [(f"{url.rstrip('/')}/", key) for key in keys if (url := attrgetter(key)(config))]
    for (outer, first), (inner, second) in combinations(sorted(urls), 2):
        if inner.startswith(outer):
            yield (f"{second} {inner[:-1]} lies in {first} {outer[:-1]}: token shards, checkpoints and the export need "
                   f"separate places.")


def absent_attention(config: Config) -> Iterator[str]:
    """A sentence if the module that `train.attention` names is missing: the launcher does not import it."""
    module, colon, _ = config.train.attention.partition(":")
    if colon and source_of(module) is None:
        yield (f"train.attention names {config.train.attention}, but there is no module {module}. Name its file in "
               f"`plugins`, put it next to one that is named there, or install it.")


def needed_modules(config: Config, stage: str) -> Iterator[tuple[str, str, str]]:
    """Parts of a configuration that need an optional module: the part, the module, and how to do without.

    Raises:
        UserError: filters, loggers or hooks cannot be imported, or have wrong settings.
    """
    shard, train = config.shard, config.train
    if stage == "shard":
        for source in shard.sources:
            for package in web_packages(source, getattr(source, "paths", ())):
                yield f"the source {source.name}", package, "take it out of shard.sources"
            if source.kind == "hf":
                yield f"the source {source.name} (kind hf)", "datasets", "take its files by kind files"
        if shard.near_duplicates is not None:
            yield "shard.near_duplicates", "rensa", "set shard.near_duplicates to null"
    if stage == "train" and config.parallel.engine == "deepspeed":
        yield "parallel.engine deepspeed", "deepspeed", "take parallel.engine=fsdp2"
    if stage == "train" and train.precision == "fp8":
        yield "train.precision fp8", "torchao", "take train.precision=bf16"
    if stage == "evaluate" and config.evaluate.tasks:
        yield "evaluate.tasks", "lm_eval", "set evaluate.tasks=[]"
    for kinds, of, items in ((FILTERS, "shard", shard.filters), (SINKS, "train", train.log_to),
                             (HOOKS, "train", train.hooks)):
        for item in kinds.made(items) if stage == of else ():
            if item.needs:
                yield f"{kinds.setting} {item.kind}", item.needs, f"take {item.kind} out of {kinds.setting}"


def absent_packages(config: Config, stage: str) -> list[str]:
    """Packages that a stage needs and that are missing, and kinds that cannot be imported, as sentences."""
    try:
        return [problem for needed in needed_modules(config, stage) for problem in absent(*needed)]
    except UserError as error:
        return [str(error)]
