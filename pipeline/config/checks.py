"""Combinations of settings that cannot work, each as a sentence with the numbers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress

from drover.model.attention import BACKENDS
from drover.pipeline.config.batch import BatchPlan, batch_problems
from drover.pipeline.config.guarding import FIRST
from drover.pipeline.config.mixture import mixture_problems
from drover.pipeline.config.optimizers import optimizer_problems
from drover.pipeline.config.parallel import ParallelConfig
from drover.pipeline.config.partial import UnknownSettingError
from drover.pipeline.config.phases import in_phases, plan_problems
from drover.pipeline.config.places import not_a_path, store_problems, unreadable
from drover.pipeline.config.shipped import name_of
from drover.pipeline.config.tree import Config

UINT16_IDS = 65536
SPECIAL_IDS = 256
MOST_NAME = 100
"""Bytes of a source's name, of which names of files are made."""
TRAINED = ("sentencepiece", "bpe")


def problems(config: Config) -> list[str]:
    """Every impossible combination in `config`; empty when it can run.

    Of a configuration with wrong values in it (`partial.known_part`), those that can be judged without these.
    """
    found: list[str] = []
    for check in CHECKS:
        with suppress(UnknownSettingError):
            for problem in check(config):
                found.append(problem)  # what comes before an unknown setting is kept
    with suppress(UnknownSettingError):
        found += _of_phases(config)
    return found


def _of_phases(config: Config) -> list[str]:
    """What cannot work of the settings that phases may have for themselves, each problem where it is met first."""
    found: dict[str, str] = {}
    for phase, within in in_phases(config):
        for check in PHASE_CHECKS:
            with suppress(UnknownSettingError):
                for problem in check(within):
                    found.setdefault(problem, problem if phase.said is None else f"{phase.name}: {problem}")
    return list(found.values())


def rank_problems(config: Config, ranks: int) -> list[str]:
    """Combinations that cannot work on `ranks` processes."""
    if found := grid_problems(config.parallel, ranks):
        return found
    if config.train.profile.start is not None and (absent := [
            rank for rank in config.train.profile.ranks if rank >= ranks]):
        return [f"train.profile.ranks names {', '.join(map(str, absent))}, but there are {ranks} ranks, from 0 on."]
    if not config.train.phases:
        return batch_problems(config.train, config.parallel, ranks)
    found = [f"{phase.name}: {problem}" for phase, within in in_phases(config)
             for problem in batch_problems(within.train, within.parallel, ranks)]
    numbers = [BatchPlan.of(within.train, within.parallel, ranks).accumulation for _, within in in_phases(config)]
    if config.parallel.engine == "deepspeed" and len(set(numbers)) > 1:
        found.append(f"parallel.engine 'deepspeed' takes the same number of micro-batches in every step, and in "
                     f"train.phases they are {', '.join(map(str, numbers))}: set micro_batch in the phases so that "
                     f"they are equal, or take 'fsdp2'.")
    return found


def grid_problems(parallel: ParallelConfig, ranks: int) -> list[str]:
    """Why so many ranks cannot be laid out as the configuration says."""
    sizes = {"pp": parallel.pp, "dp_replicate": parallel.dp_replicate, "dp_shard": parallel.dp_shard,
             "cp": parallel.cp, "tp": parallel.tp}
    rest = [name for name, size in sizes.items() if size == -1]
    for name in rest:
        del sizes[name]
    for optional in ("pp", "cp"):  # named where they are used
        if sizes[optional] == 1:
            del sizes[optional]
    needed = math.prod(sizes.values())
    terms = " x ".join(f"{name} {size}" for name, size in sizes.items())
    if rest and ranks % needed:
        return [f"{ranks} ranks are not divisible by {needed} (parallel: {terms}, {rest[0]} -1 for the rest)."]
    if not rest and ranks != needed:
        return [f"parallel: {terms} is {needed}, but there are {ranks} ranks."]
    return []


def _model(config: Config) -> Iterator[str]:
    yield from (f"model: {problem}" for problem in config.model.problems())


def _sequence(config: Config) -> Iterator[str]:
    if config.train.sequence_length > config.model.context_length:
        yield (f"train.sequence_length {config.train.sequence_length} is longer than model.context_length "
               f"{config.model.context_length}.")


def _batch(config: Config) -> Iterator[str]:
    tokens, length = config.train.batch_tokens, config.train.sequence_length
    if tokens % length:
        yield (f"train.batch_tokens {tokens} is not a multiple of train.sequence_length {length}; nearest: "
               f"{max(1, round(tokens / length)) * length}.")


def _samples(config: Config) -> Iterator[str]:
    if config.train.sample_tokens >= config.model.context_length:
        yield (f"train.sample_tokens {config.train.sample_tokens} leaves no room for a prompt in model.context_length "
               f"{config.model.context_length}.")


def _prompts(config: Config) -> Iterator[str]:
    if config.evaluate.prompt_tokens >= config.model.context_length:
        yield (f"evaluate.prompt_tokens {config.evaluate.prompt_tokens} leaves no room for a prompt in "
               f"model.context_length {config.model.context_length}.")


def _evaluation(config: Config) -> Iterator[str]:
    if (config.evaluate.sequence_length or 0) > config.model.context_length:
        yield (f"evaluate.sequence_length {config.evaluate.sequence_length} is longer than model.context_length "
               f"{config.model.context_length}.")


def _tensor_parallel(config: Config) -> Iterator[str]:
    model, tp = config.model, config.parallel.tp
    numbers: dict[str, Callable[[], int | None]] = {
        "model.heads": lambda: model.heads, "model.kv_heads": lambda: model.kv_heads,
        "the feed-forward width": lambda: model.hidden, "model.context_length": lambda: model.context_length,
        "train.sequence_length": lambda: config.train.sequence_length,
        "the vocabulary": lambda: model.vocab_size or vocabulary_size(config)}
    for name, number in numbers.items():
        with suppress(UnknownSettingError):
            if (value := number()) is not None and value % tp:
                yield f"{name} ({value}) is not divisible by parallel.tp ({tp})."


def _context_parallel(config: Config) -> Iterator[str]:
    parallel, length = config.parallel, config.train.sequence_length
    parts = parallel.cp * parallel.tp
    if parallel.cp > 1 and length % parts and not length % parallel.tp:
        yield (f"train.sequence_length {length} is not divisible by {parts} (parallel: cp {parallel.cp} x tp "
               f"{parallel.tp}).")


def _pipeline(config: Config) -> Iterator[str]:
    parallel, layers = config.parallel, config.model.layers
    if parallel.stages > layers:
        yield (f"parallel: {parallel.stages} pipeline stages (pp {parallel.pp}, pp_schedule {parallel.pp_schedule}) "
               f"are more than model.layers {layers}.")
    if parallel.pp > 1 and parallel.pp_schedule == "zbv":
        if config.model.tied_embeddings:
            yield ("parallel.pp_schedule zbv has the first and the last stage on one rank, each with its own matrix: "
                   "it does not take model.tied_embeddings. Take 1f1b or interleaved.")
        if config.train.compile is not False:
            yield ("parallel.pp_schedule zbv cuts backward passes in two, which torch cannot do with compiled blocks: "
                   "set train.compile to false (null compiles on GPUs), or take 1f1b or interleaved.")
        if config.train.activation_checkpointing == "selective":
            yield ("parallel.pp_schedule zbv runs each backward pass in two parts, but torch gives out only once what "
                   "selective checkpointing kept: set train.activation_checkpointing to none or full.")
        if parallel.reshard != "never":
            yield ("parallel.pp_schedule zbv needs parallel.reshard never: a gradient that is computed later finds the "
                   "weights only where they are still gathered.")


def _average(config: Config) -> Iterator[str]:
    steps, last = config.convert.average, config.train.steps
    if sorted(set(steps)) != steps or max(steps, default=0) > last:
        yield f"convert.average is {steps}: name each step once, in order, and none above train.steps {last}."


def _shards(config: Config) -> Iterator[str]:
    yield from (f"parallel.{name} is 0; give a number, or -1 for all the rest of the ranks." for name in
                ("dp_shard", "dp_replicate") if getattr(config.parallel, name) == 0)
    if config.parallel.dp_replicate == config.parallel.dp_shard == -1:
        yield ("parallel.dp_replicate and parallel.dp_shard are both -1, the rest of the ranks; give one of them a "
               "number, as in dp_replicate=-1 dp_shard=8: a copy on every 8 ranks.")


def _activation_checkpointing(config: Config) -> Iterator[str]:
    train, model = config.train, config.model
    if train.activation_checkpointing == "selective" and not train.kept_activations:
        yield "train.kept_activations is empty; to keep nothing, take train.activation_checkpointing=full."
    if train.recomputed_blocks > model.layers:
        yield f"train.recomputed_blocks {train.recomputed_blocks} is more than model.layers {model.layers}."


def _attention(config: Config) -> Iterator[str]:
    name = config.train.attention
    if name not in ("auto", *BACKENDS) and ":" not in name:
        yield (f"train.attention '{name}' is not known; there are auto, {', '.join(BACKENDS)}, and a class of your own "
               f"as module:class.")


def _fsdp2(config: Config) -> Iterator[str]:
    if config.parallel.engine == "fsdp2" and config.parallel.offload != "none":
        yield f"parallel.offload '{config.parallel.offload}' is for parallel.engine 'deepspeed', not 'fsdp2'."


def _async_tensor_parallel(config: Config) -> Iterator[str]:
    parallel = config.parallel
    if not parallel.async_tp:
        return
    if parallel.tp == 1:
        yield "parallel.async_tp true has nothing to cut where parallel.tp is 1."
    if config.train.compile is False:
        yield ("parallel.async_tp true is done by the compiler, but train.compile is false; set compile to null or "
               "true.")


def _timeout(config: Config) -> Iterator[str]:
    timeout, hang = config.parallel.timeout_minutes, config.train.guards.hang_minutes
    if timeout is not None and hang is not None and timeout <= FIRST * hang:
        yield (f"parallel.timeout_minutes {timeout} is not longer than {FIRST} x train.guards.hang_minutes {hang}, for "
               f"which the watchdog waits in a first step: ranks would end before they have written down where they "
               f"hang. Raise it, lower hang_minutes, or set one of them to null.")


def _deepspeed(config: Config) -> Iterator[str]:
    parallel, train = config.parallel, config.train
    if parallel.engine != "deepspeed":
        return
    if parallel.tp > 1 or parallel.dp_replicate != 1 or parallel.dp_shard != -1:
        yield (f"parallel.engine 'deepspeed' spreads one copy over all ranks: set dp_replicate 1, dp_shard -1 "
               f"and tp 1 (they are {parallel.dp_replicate}, {parallel.dp_shard} and {parallel.tp}), or take 'fsdp2'.")
    yield from (f"parallel.{name} {size} is for parallel.engine 'fsdp2', not 'deepspeed'."
                for name, size in (("cp", parallel.cp), ("pp", parallel.pp)) if size > 1)
    if parallel.reshard != "always":
        yield f"parallel.reshard '{parallel.reshard}' is for parallel.engine 'fsdp2', not 'deepspeed'."
    if parallel.reduce != "each":
        yield (f"parallel.reduce '{parallel.reduce}' is for parallel.engine 'fsdp2', not 'deepspeed', whose stage 1 "
               f"does so by itself.")
    if parallel.offload == "params" and parallel.zero_stage != 3:
        yield (f"parallel.offload 'params' needs parallel.zero_stage 3, not {parallel.zero_stage}: before, every "
               f"rank computes with the whole weights.")
    if parallel.zero_stage == 3 and train.compile:
        yield ("train.compile true does not work with parallel.zero_stage 3, whose hooks break every graph; set "
               "compile to null or false, or take stage 2 or fsdp2.")
    if train.precision in ("fp64", "fp8"):
        yield f"train.precision '{train.precision}' needs parallel.engine 'fsdp2': DeepSpeed computes in fp32 or bf16."


def _fp8(config: Config) -> Iterator[str]:
    length, cp = config.train.sequence_length, config.parallel.cp
    if config.train.precision == "fp8" and length % (16 * cp):
        over = f" x parallel.cp {cp}" if cp > 1 else ""
        yield (f"train.sequence_length {length} is not a multiple of 16{over}, which train.precision 'fp8' needs: the "
               f"weights' gradients are products over the tokens of a rank.")


def _optimizer(config: Config) -> Iterator[str]:
    yield from optimizer_problems(config.train, config.parallel.engine)
    yield from (f"train.lr_factors has {factor} for '{pattern}'; a factor is 0 or more."
                for pattern, factor in config.train.lr_factors.items() if factor < 0)


def _schedule(config: Config) -> Iterator[str]:
    train = config.train
    if train.decay_steps is not None and train.schedule != "wsd":
        yield (f"train.decay_steps {train.decay_steps} is set, but train.schedule is "
               f"'{train.schedule}'; it applies to 'wsd' only.")
    decay = (train.decay_steps or 0) if train.schedule == "wsd" else 0
    if train.warmup_steps + decay > train.steps:
        terms = f"train.warmup_steps {train.warmup_steps}" + (f" + train.decay_steps {decay}" if decay else "")
        yield f"{terms} is more than train.steps {train.steps}."


def _tokenizer(config: Config) -> Iterator[str]:
    tokenizer = config.tokenizer
    if tokenizer.kind in ("tiktoken", "huggingface") and tokenizer.path is None:
        yield f"tokenizer.kind '{tokenizer.kind}' needs tokenizer.path: it is read from a file, not trained."
    if tokenizer.kind == "bpe" and tokenizer.path is not None:
        yield ("tokenizer.path is set, but tokenizer.kind 'bpe' is trained; for a ready file of such ranks take "
               "tokenizer.kind=tiktoken.")
    if tokenizer.kind in ("byte", "char") and tokenizer.path is not None:
        yield f"tokenizer.path is set, but tokenizer.kind '{tokenizer.kind}' takes no file."
    if tokenizer.kind not in TRAINED or tokenizer.path is not None:
        return
    if tokenizer.vocab_size % 128:
        yield (f"tokenizer.vocab_size {tokenizer.vocab_size} is not a multiple of 128; nearest: "
               f"{max(5, round(tokenizer.vocab_size / 128)) * 128}.")
    if tokenizer.vocab_size < 640:
        yield (f"tokenizer.vocab_size {tokenizer.vocab_size} leaves no room: 256 special ids and 256 bytes "
               f"come first; take at least 640.")


def _ids(config: Config) -> Iterator[str]:
    known = vocabulary_size(config)
    if config.encode.dtype == "uint16" and known is not None and known > UINT16_IDS:
        yield (f"encode.dtype uint16 holds ids up to {UINT16_IDS - 1}, but the vocabulary has {known}; "
               f"take uint32 or auto.")


def _embedding(config: Config) -> Iterator[str]:
    known = vocabulary_size(config)
    if known is not None and config.model.vocab_size is not None and config.model.vocab_size < known:
        yield f"model.vocab_size {config.model.vocab_size} is smaller than the tokenizer's {known}."


def vocabulary_size(config: Config) -> int | None:
    """Ids of the vocabulary where the configuration alone decides it, else None."""
    tokenizer = config.tokenizer
    if tokenizer.kind == "byte":
        return 256 + SPECIAL_IDS
    if tokenizer.kind in TRAINED and tokenizer.path is None:
        return tokenizer.vocab_size
    return config.model.vocab_size if tokenizer.path is not None else None


def _sources(config: Config) -> Iterator[str]:
    names = [source.name for source in config.shard.sources]
    yield from (f"shard.sources has {count} sources named '{name}'; names must differ."
                for name, count in Counter(names).items() if count > 1)
    yield from (f"the source name '{name}' in shard.sources must be letters, digits, '_' or '-': it becomes a file "
                f"name." for name in names if not name.replace("_", "").replace("-", "").isalnum())
    yield from (f"the source name '{name[:20]}...' in shard.sources has {len(name.encode())} bytes: names of files are "
                f"made of it, so take at most {MOST_NAME}." for name in names if len(name.encode()) > MOST_NAME)


def _filters(config: Config) -> Iterator[str]:
    names = Counter(name_of(item) for item in config.shard.filters)
    yield from (f"shard.filters has {count} filters named '{name}'; give them a `name` each."
                for name, count in names.items() if count > 1)
    yield from (f"a filter of shard.filters is named '{name}', which counts other documents; give it another `name`."
                for name in names if name in ("duplicate", "empty"))
    if config.shard.keep_dropped and not names and not config.shard.drop_duplicates:
        yield ("shard.keep_dropped is true, but there are no shard.filters that could drop a document, and "
               "shard.drop_duplicates is false.")


def _near_duplicates(config: Config) -> Iterator[str]:
    if config.shard.near_duplicates is not None and not config.shard.drop_duplicates:
        yield ("shard.near_duplicates drops documents that are nearly equal, but shard.drop_duplicates is false, which "
               "keeps equal ones. Set shard.drop_duplicates to true, or shard.near_duplicates to null.")


def _sinks(config: Config) -> Iterator[str]:
    counts = Counter(sink.kind for sink in config.train.log_to)
    yield from (f"train.log_to names {kind} {count} times; once is enough." for kind, count in counts.items()
                if count > 1)


def _phases(config: Config) -> Iterator[str]:
    yield from plan_problems(config.train)


def _max_epochs(config: Config) -> Iterator[str]:
    limit = config.train.max_epochs
    limits = limit if isinstance(limit, dict) else {} if limit is None else {"all sources": limit}
    yield from (f"train.max_epochs is {most:g} for {name}; a limit is above 0." for name, most in limits.items()
                if most <= 0)
    names = [source.name for source in config.shard.sources]
    if isinstance(limit, dict) and (unknown := sorted(set(limit) - set(names))):
        yield f"train.max_epochs names {', '.join(unknown)}, but the sources are {', '.join(names)}."


def _mixture(config: Config) -> Iterator[str]:
    mixture = config.train.mixture
    if mixture is None:
        return
    if any(share < 0 for share in mixture.values()) or not sum(mixture.values()) > 0:
        yield f"train.mixture needs shares of 0 or more with a sum above 0, not {mixture}."
    else:
        yield from mixture_problems(mixture)
    names = [source.name for source in config.shard.sources]
    unknown, missing = sorted(set(mixture) - set(names)), sorted(set(names) - set(mixture))
    if unknown:
        yield f"train.mixture names {', '.join(unknown)}, but the sources are {', '.join(names)}."
    if missing:
        yield f"train.mixture says nothing of {', '.join(missing)}; write 0 to leave a source out."


def place_problems(config: Config) -> Iterator[str]:
    """Paths that are addresses: as a path, `s3://a` would become a folder `s3:` here."""
    with suppress(UnknownSettingError):
        if (said := not_a_path(config.runs_dir, written=True)) is not None:
            yield f"runs_dir: {said}"
    paths: dict[str, Callable[[], list[str | None]]] = {
        "reuse": lambda: [config.reuse],
        "tokenizer.path": lambda: [config.tokenizer.path], "train.init_from": lambda: [config.train.init_from],
        "evaluate.task_folders": lambda: list(config.evaluate.task_folders)}
    for key, values in paths.items():
        with suppress(UnknownSettingError):
            yield from (f"{key}: {said}" for path in values() if path and (said := not_a_path(path)))
    for source in config.shard.sources:
        if source.kind == "files":
            yield from (f"source {source.name}: {said}" for path in source.paths if (said := unreadable(path)))
        elif source.kind == "hf" and (said := not_a_path(source.dataset)):
            yield f"source {source.name}: {said}"
    for item in config.shard.filters:
        own = getattr(item, "path", None)
        given = [own] if isinstance(own, str) else [file.path for file in getattr(item, "files", [])]
        yield from (f"the filter {name_of(item)}: {said}" for path in given if (said := not_a_path(path)))


CHECKS: tuple[Callable[[Config], Iterator[str]], ...] = (
    _model, _samples, _prompts, _evaluation, _shards, _pipeline, _activation_checkpointing, _attention, _fsdp2,
    _async_tensor_parallel, _timeout, _average, _deepspeed, _optimizer, _schedule, _tokenizer, _ids, _embedding,
    _sources, _filters, _near_duplicates, _sinks, _phases, _max_epochs, store_problems, place_problems)
PHASE_CHECKS: tuple[Callable[[Config], Iterator[str]], ...] = (
    _sequence, _batch, _tensor_parallel, _context_parallel, _fp8, _mixture)
"""Of settings that phases may have for themselves."""
