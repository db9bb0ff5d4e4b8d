"""Combinations of settings that cannot work, each as a sentence with the numbers.

A rule is a condition and the sentence to print if it holds. In a sentence, `<train.steps>` is replaced by the setting
and its value. A sentence names every setting that it depends on, or the section that contains it. So a sentence can be
left out if one of its settings has no valid value.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import combinations
from operator import attrgetter
from typing import Any

from drover.model.attention import BACKENDS
from drover.model.config import ModelConfig
from drover.pipeline.config.batch import BatchPlan, batch_problems
from drover.pipeline.config.data import LEAST_COVERAGE, UINT16_IDS
from drover.pipeline.config.mixture import mixture_problems
from drover.pipeline.config.optimizers import optimizer_problems
from drover.pipeline.config.parallel import ParallelConfig
from drover.pipeline.config.phases import in_phases, plan_problems
from drover.pipeline.config.places import not_a_path, unreadable, unusable_url
from drover.pipeline.config.section import shortened
from drover.pipeline.config.shipped import name_of
from drover.pipeline.config.training import FIRST
from drover.pipeline.config.tree import Config

SPECIAL_IDS = 256
MOST_NAME = 100
"""Longest name of a source in bytes; file names contain it."""
TRAINED = ("sentencepiece", "bpe")
Rules = Iterator[tuple[Any, str]]
"""Pairs: whether it is wrong (by truth value), and the sentence."""


def problems(config: Config, unknown: Iterable[str] = ()) -> list[str]:
    """Every impossible combination in `config`; empty if it can run.

    unknown: settings and sections, dotted, without a valid value, for which `config` has a default. Problems that
        depend on one of them are left out.
    """
    found = [*_broken(_rules(config), config), *plan_problems(config.train), *_listed(config),
             *_stores(config), *place_problems(config)]
    in_phase: dict[str, str] = {}  # each where it is met first
    for phase, within in in_phases(config):
        for problem in (*_broken(_rules_of_phase(within), within), *_mixture(within)):
            in_phase.setdefault(problem, problem if phase.said is None else f"{phase.name}: {problem}")
    return [problem for problem in (*found, *in_phase.values()) if not any(_depends(problem, key) for key in unknown)]


def _broken(rules: Rules, config: Config) -> Iterator[str]:
    def shown(match: re.Match[str]) -> str:
        value = attrgetter(match[1])(config)
        return f"{match[1]} {str(value).lower() if isinstance(value, bool) else repr(value)}"

    yield from (re.sub(r"<([\w.]+)>", shown, sentence) for wrong, sentence in rules if wrong)


def _depends(problem: str, key: str) -> bool:
    """Whether a problem names a setting, or one of its sections alone."""
    sections = [key[:dot.start()] for dot in re.finditer(r"\.", key)]
    names = "|".join([f"{re.escape(key)}(?!\\w)", *(f"{re.escape(section)}(?!\\.?\\w)" for section in sections)])
    return re.search(rf"(?<![\w.])({names})", problem) is not None


def rank_problems(config: Config, ranks: int) -> list[str]:
    """Combinations that cannot work on `ranks` processes."""
    if found := grid_problems(config.parallel, ranks):
        return found
    profiled = config.train.profile
    if profiled.start is not None and (absent := [rank for rank in profiled.ranks if rank >= ranks]):
        return [f"train.profile.ranks names {', '.join(map(str, absent))}, but there are {ranks} ranks, from 0 on."]
    found, numbers = [], []
    for phase, within in in_phases(config):
        found += [problem if phase.said is None else f"{phase.name}: {problem}"
                  for problem in batch_problems(within.train, within.parallel, ranks)]
        numbers.append(BatchPlan.of(within.train, within.parallel, ranks).accumulation)
    if config.parallel.engine == "deepspeed" and len(set(numbers)) > 1:
        found.append(f"parallel.engine 'deepspeed' takes the same number of micro-batches in every step, and in "
                     f"train.phases they are {', '.join(map(str, numbers))}: set micro_batch in the phases so that "
                     f"they are equal, or take 'fsdp2'.")
    return found


def grid_problems(parallel: ParallelConfig, ranks: int) -> list[str]:
    """Why so many ranks cannot be laid out as the configuration says."""
    sizes = {name: getattr(parallel, name) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp")}
    rest = [name for name, size in sizes.items() if size == -1]
    shown = {name: size for name, size in sizes.items() if size > 1 or (size != -1 and name not in ("pp", "cp"))}
    needed = math.prod(shown.values())
    terms = " x ".join(f"{name} {size}" for name, size in shown.items())
    if rest and ranks % needed:
        return [f"{ranks} ranks are not divisible by {needed} (parallel: {terms}, {rest[0]} -1 for the rest)."]
    if not rest and ranks != needed:
        return [f"parallel: {terms} is {needed}, but there are {ranks} ranks."]
    return []


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
    context, evaluate, average = model.context_length, config.evaluate, config.convert.average
    yield train.sample_tokens >= context, "<train.sample_tokens> leaves no room for a prompt in <model.context_length>."
    yield (evaluate.prompt_tokens >= context,
           "<evaluate.prompt_tokens> leaves no room for a prompt in <model.context_length>.")
    yield ((evaluate.sequence_length or 0) > context,
           "<evaluate.sequence_length> is longer than <model.context_length>.")

    selective = train.activation_checkpointing == "selective"
    yield (selective and not train.kept_activations,
           "train.kept_activations is empty; to keep nothing, take train.activation_checkpointing=full.")
    yield train.recomputed_blocks > model.layers, "<train.recomputed_blocks> is more than <model.layers>."
    yield (train.attention not in ("auto", *BACKENDS) and ":" not in train.attention,
           f"<train.attention> is not known. Take auto, {', '.join(BACKENDS)}, or a class of your own as "
           f"module:class.")
    yield (train.decay_steps is not None and train.schedule != "wsd",
           "<train.decay_steps> is set, but <train.schedule>; it applies to 'wsd' only.")
    decay = (train.decay_steps or 0) if train.schedule == "wsd" else 0
    yield (train.warmup_steps + decay > train.steps,
           f"<train.warmup_steps>{' + <train.decay_steps>' * (decay > 0)} is more than <train.steps>.")
    yield (sorted(set(average)) != average or max(average, default=0) > train.steps,
           "<convert.average>: name each step once, in order, and none above <train.steps>.")
    timeout, hang = parallel.timeout_minutes, train.guards.hang_minutes
    yield (timeout is not None and hang is not None and timeout <= FIRST * hang,
           f"<parallel.timeout_minutes> is not longer than {FIRST} x <train.guards.hang_minutes>, the watchdog's limit "
           f"for a first step: ranks would end before they record where they hang. Raise it, lower hang_minutes, or "
           f"set one of them to null.")

    for name in ("dp_shard", "dp_replicate"):
        yield (getattr(parallel, name) == 0,
               f"<parallel.{name}>; give a number above 0, or -1 for all the rest of the ranks.")
    yield (parallel.dp_replicate == parallel.dp_shard == -1,
           "parallel.dp_replicate and parallel.dp_shard are both -1, the rest of the ranks. Give one of them a number, "
           "as in dp_replicate=-1 dp_shard=8: a replica on every 8 ranks.")
    yield (parallel.stages > model.layers,
           f"parallel: {parallel.stages} pipeline stages (<parallel.pp>, <parallel.pp_schedule>) are more than "
           f"<model.layers>.")
    yield parallel.async_tp and parallel.tp == 1, "<parallel.async_tp> has no effect if parallel.tp is 1. Unset it."
    yield (parallel.async_tp and train.compile is False,
           "<parallel.async_tp> needs compiled blocks, but <train.compile>; set compile to null or true.")
    zbv = parallel.pp > 1 and parallel.pp_schedule == "zbv"
    yield (zbv and model.tied_embeddings,
           "<parallel.pp_schedule> does not work with model.tied_embeddings: the first and the last stage are on one "
           "rank, each with its own matrix. Take 1f1b or interleaved.")
    yield (zbv and train.compile is not False,
           "<parallel.pp_schedule> cuts backward passes in two, which torch cannot do with compiled blocks: set "
           "train.compile to false (null compiles on GPUs), or take 1f1b or interleaved.")
    yield (zbv and selective,
           "<parallel.pp_schedule> runs each backward pass in two parts, but torch can use the results of selective "
           "checkpointing only once: set train.activation_checkpointing to none or full.")
    yield (zbv and parallel.reshard != "never",
           "<parallel.pp_schedule> needs parallel.reshard never: weight gradients are computed later, when resharded "
           "weights would be gone.")
    deepspeed = parallel.engine == "deepspeed"
    yield not deepspeed and parallel.offload != "none", "<parallel.offload> is for parallel.engine 'deepspeed'."
    yield (deepspeed and (parallel.tp > 1 or parallel.dp_replicate != 1 or parallel.dp_shard != -1),
           "<parallel.engine> shards one replica over all ranks: set dp_replicate 1, dp_shard -1 and tp 1 (here are "
           "<parallel.dp_replicate>, <parallel.dp_shard> and <parallel.tp>), or take 'fsdp2'.")
    for key, usual in (("cp", 1), ("pp", 1), ("reshard", "always"), ("reduce", "each")):
        yield (deepspeed and getattr(parallel, key) != usual,
               f"<parallel.{key}> is for parallel.engine 'fsdp2', not 'deepspeed'.")
    yield (deepspeed and parallel.offload == "params" and parallel.zero_stage != 3,
           "<parallel.offload> needs stage 3, not <parallel.zero_stage>: in lower stages every rank needs all weights.")
    yield (deepspeed and parallel.zero_stage == 3 and train.compile,
           "<train.compile> does not work with <parallel.zero_stage>, whose hooks break every graph; set compile to "
           "null or false, or take stage 2 or fsdp2.")
    mps = config.launch.device == "mps"
    yield mps and train.precision not in ("auto", "fp32"), "<train.precision> is not for <launch.device>; take fp32."
    yield mps and deepspeed, "<parallel.engine> is not for <launch.device>; take 'fsdp2'."
    yield (deepspeed and train.precision in ("fp64", "fp8"),
           "<train.precision> needs parallel.engine 'fsdp2': DeepSpeed computes in fp32 or bf16.")

    tokenizer, known = config.tokenizer, vocabulary_size(config) or 0
    kind, given = tokenizer.kind, tokenizer.path is not None
    trained = kind in TRAINED and not given
    yield (kind in ("tiktoken", "huggingface") and not given,
           "<tokenizer.kind> needs tokenizer.path: it is read from a file, not trained.")
    yield (kind == "bpe" and given, "tokenizer.path is set, but tokenizer.kind 'bpe' is trained; for a ready file of "
                                    "such ranks take tokenizer.kind=tiktoken.")
    yield kind in ("byte", "char") and given, "tokenizer.path is set, but <tokenizer.kind> takes no file."
    nearest = max(5, round(tokenizer.vocab_size / 128)) * 128
    yield (trained and tokenizer.vocab_size % 128,
           f"<tokenizer.vocab_size> is not a multiple of 128; nearest: {nearest}.")
    yield (trained and tokenizer.vocab_size < 640,
           "<tokenizer.vocab_size> leaves no room: 256 special ids and 256 bytes come first; take at least 640.")
    yield (trained and tokenizer.vocab_size >= 2**31,
           "<tokenizer.vocab_size> is more than any trainer counts to; 32768 to 262144 are usual.")
    yield (trained and kind == "sentencepiece" and tokenizer.character_coverage < LEAST_COVERAGE,
           f"<tokenizer.character_coverage> is less than sentencepiece takes; set it to {LEAST_COVERAGE} or more, "
           f"or take tokenizer.kind=bpe, which spells rare characters in bytes.")
    yield (config.encode.dtype == "uint16" and known > UINT16_IDS,
           f"<encode.dtype> holds ids up to {UINT16_IDS - 1}, but the vocabulary of the tokenizer has {known}; take "
           f"uint32 or auto.")
    yield ((model.vocab_size or known) < known, f"<model.vocab_size> is smaller than the tokenizer's {known}.")
    yield (shard.keep_dropped and not shard.filters and not shard.drop_duplicates,
           "<shard.keep_dropped>, but there are no shard.filters that could drop a document, and "
           "<shard.drop_duplicates>.")
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
    train, sources = config.train, Counter(config.shard.source_names)
    yield from (f"model: {problem}" for problem in config.model.problems())
    yield from optimizer_problems(train, config.parallel.engine)
    filters = Counter(map(name_of, config.shard.filters))
    for key, what, counts in (("shard.sources", "sources named", sources), ("shard.filters", "filters named", filters),
                              ("train.log_to", "sinks of kind", Counter(sink.kind for sink in train.log_to))):
        yield from (f"{key} has {count} {what} '{name}'; there can be one."
                    for name, count in counts.items() if count > 1)
    yield from (f"the source name '{shortened(name, 50)}' in shard.sources must be letters, digits, '_' or '-': file "
                f"names contain it."
                for name in sources if not name.replace("_", "").replace("-", "").isalnum())
    sizes = {name: len(name.encode("utf-8", "replace")) for name in sources}
    yield from (f"the source name '{name[:20]}...' in shard.sources has {size} bytes; take at most {MOST_NAME}, "
                "because file names contain it." for name, size in sizes.items() if size > MOST_NAME)
    yield from (f"a filter of shard.filters has the reserved name '{name}'; give it another `name`."
                for name in filters if name in ("duplicate", "empty"))
    for item in config.shard.filters:
        named = getattr(item, "sources", None)
        if isinstance(named, list) and all(isinstance(name, str) for name in named):  # one from outside is not checked
            yield from _no_sources(f"shard.filters: the filter {name_of(item)}", named, sources)
    limits = train.max_epochs if isinstance(train.max_epochs, dict) else dict.fromkeys(sources, train.max_epochs)
    yield from (f"train.max_epochs is {most:g} for {name}; a limit is above 0." for name, most in limits.items()
                if most is not None and most <= 0)
    yield from _no_sources("train.max_epochs", limits, sources)


def _mixture(config: Config) -> Iterator[str]:
    mixture, sources = config.train.mixture, config.shard.source_names
    if mixture is None:
        return
    if min(mixture.values(), default=0) < 0 or not sum(mixture.values()) > 0:
        yield f"train.mixture needs shares of 0 or more with a sum above 0, not {mixture}."
    else:
        yield from mixture_problems(mixture)
    yield from _no_sources("train.mixture", mixture, sources)
    if missing := sorted(set(sources) - set(mixture)):
        yield f"train.mixture lacks {', '.join(missing)} of shard.sources; write 0 to leave a source out."


def _no_sources(key: str, named: Iterable[str], sources: Iterable[str]) -> Iterator[str]:
    if unknown := sorted(set(named) - set(sources)):
        yield f"{key} names {', '.join(unknown)}, but shard.sources are {', '.join(sources)}."


def place_problems(config: Config) -> Iterator[str]:
    """Problems with paths that are URLs: as a path, `s3://a` would become a folder `s3:` here."""
    if (said := not_a_path(config.runs_dir, written=True)) is not None:
        yield f"runs_dir: {said}"
    paths = [(key, attrgetter(key)(config)) for key in ("reuse", "tokenizer.path", "train.init_from")]
    paths += [("evaluate.task_folders", folder) for folder in config.evaluate.task_folders]
    for source in config.shard.sources:
        if source.kind == "files":
            yield from (f"source {source.name}: {said}" for path in source.paths if (said := unreadable(path)))
        elif source.kind == "hf":
            paths.append((f"source {source.name}", source.dataset))
    for item in config.shard.filters:
        files = getattr(item, "files", [])  # of a filter of one's own, these settings may be anything
        own = [item, *(files if isinstance(files, list) else [])]
        paths += [(f"the filter {name_of(item)}", path) for one in own
                  if isinstance(path := getattr(one, "path", None), str)]
    yield from (f"{key}: {said}" for key, path in paths if path and (said := not_a_path(path)))


WRITTEN = ("encode.copy_to", "train.checkpoint.copy_to", "convert.copy_to")
"""Settings that are URLs in stores. No two of them may share a place."""


def _stores(config: Config) -> Iterator[str]:
    """Why stores for uploads, or for training data, cannot be used as configured."""
    found = {}
    for key in (*WRITTEN, "train.tokens_from"):
        url = attrgetter(key)(config)
        if url is not None and "?" in url:
            yield f"{key} has a question mark; uploads to a signed URL do not work. Give the URL of a prefix."
        elif url is not None and (said := unusable_url(url)):
            yield f"{key}: {said}"
        elif url is not None and key in WRITTEN:  # others are not compared: a password would be printed
            found[key] = f"{url.rstrip('/')}/"
    for (first, place), (second, other) in combinations(found.items(), 2):
        inner, outer = (second, first) if other.startswith(place) else (first, second)
        if found[inner].startswith(found[outer]):
            yield (f"{inner} {found[inner][:-1]} lies in {outer} {found[outer][:-1]}: token shards, checkpoints and "
                   f"the export need separate places.")
