"""Combinations of settings that cannot work, each as a sentence with the numbers."""

from __future__ import annotations

import math
from collections import Counter

from pipeline.config.parallel import ParallelConfig
from pipeline.config.tree import Config

UINT16_IDS = 65536
SPECIAL_IDS = 256


def problems(config: Config) -> list[str]:
    """Every impossible combination in `config`; empty when it can run."""
    found = [f"model: {problem}" for problem in config.model.problems()]
    found += _batch(config) + _parallel(config) + _schedule(config) + _vocabulary(config) + _sources(config)
    return found


def _batch(config: Config) -> list[str]:
    train, found = config.train, []
    if train.sequence_length > config.model.context_length:
        found.append(f"train.sequence_length {train.sequence_length} is longer than model.context_length "
                     f"{config.model.context_length}.")
    if train.batch_tokens % train.sequence_length:
        found.append(f"train.batch_tokens {train.batch_tokens} is not a multiple of train.sequence_length "
                     f"{train.sequence_length}; nearest: "
                     f"{max(1, round(train.batch_tokens / train.sequence_length)) * train.sequence_length}.")
    if train.sample_tokens >= config.model.context_length:
        found.append(f"train.sample_tokens {train.sample_tokens} leaves no room for a prompt in model.context_length "
                     f"{config.model.context_length}.")
    if config.evaluate.prompt_tokens >= config.model.context_length:
        found.append(f"evaluate.prompt_tokens {config.evaluate.prompt_tokens} leaves no room for a prompt in "
                     f"model.context_length {config.model.context_length}.")
    if (config.evaluate.sequence_length or 0) > config.model.context_length:
        found.append(f"evaluate.sequence_length {config.evaluate.sequence_length} is longer than model.context_length "
                     f"{config.model.context_length}.")
    return found


def rank_problems(config: Config, ranks: int) -> list[str]:
    """Combinations that cannot work on `ranks` processes."""
    train, parallel = config.train, config.parallel
    if found := grid_problems(parallel, ranks):
        return found
    if train.batch_tokens % train.sequence_length:
        return []  # said by `problems`
    data_ranks = ranks // parallel.tp
    sequences, per_round = train.batch_tokens // train.sequence_length, train.micro_batch * data_ranks
    if sequences % per_round:
        found.append(f"the global batch of {sequences} sequences (train.batch_tokens {train.batch_tokens} / "
                     f"train.sequence_length {train.sequence_length}) is not divisible by {per_round} "
                     f"(train.micro_batch {train.micro_batch} x {data_ranks} data-parallel ranks).")
    return found


def grid_problems(parallel: ParallelConfig, ranks: int) -> list[str]:
    """Why so many ranks cannot be laid out as the configuration says."""
    sizes = {"dp_replicate": parallel.dp_replicate, "dp_shard": parallel.dp_shard, "tp": parallel.tp}
    if parallel.dp_shard == -1:
        del sizes["dp_shard"]
    needed = math.prod(sizes.values())
    terms = " x ".join(f"{name} {size}" for name, size in sizes.items())
    if parallel.dp_shard == -1 and ranks % needed:
        return [f"{ranks} ranks are not divisible by {needed} (parallel: {terms}, dp_shard -1 for the rest)."]
    if parallel.dp_shard != -1 and ranks != needed:
        return [f"parallel: {terms} is {needed}, but there are {ranks} ranks."]
    return []


def _parallel(config: Config) -> list[str]:
    parallel, train, model, found = config.parallel, config.train, config.model, []
    if parallel.dp_shard == 0:
        found.append("parallel.dp_shard is 0; give the number of ranks that share a copy, or -1 for all the rest.")
    numbers = {"model.heads": model.heads, "model.kv_heads": model.kv_heads, "the feed-forward width": model.hidden,
               "model.context_length": model.context_length, "train.sequence_length": train.sequence_length,
               "the vocabulary": model.vocab_size or vocabulary_size(config)}
    found += [f"{name} ({number}) is not divisible by parallel.tp ({parallel.tp})."
              for name, number in numbers.items() if number is not None and number % parallel.tp]
    if train.recomputed_blocks > model.layers:
        found.append(f"train.recomputed_blocks {train.recomputed_blocks} is more than model.layers {model.layers}.")
    if train.activation_checkpointing == "selective" and not train.kept_activations:
        found.append("train.kept_activations is empty; to keep nothing, take train.activation_checkpointing=full.")
    if parallel.engine == "fsdp2":
        if parallel.offload != "none":
            found.append(f"parallel.offload '{parallel.offload}' is for parallel.engine 'deepspeed', not 'fsdp2'.")
        return found
    if parallel.tp > 1 or parallel.dp_replicate > 1 or parallel.dp_shard != -1:
        found.append(f"parallel.engine 'deepspeed' spreads one copy over all ranks: set dp_replicate 1, dp_shard -1 "
                     f"and tp 1 (they are {parallel.dp_replicate}, {parallel.dp_shard} and {parallel.tp}), or take "
                     f"'fsdp2'.")
    if parallel.offload == "params" and parallel.zero_stage != 3:
        found.append(f"parallel.offload 'params' needs parallel.zero_stage 3, not {parallel.zero_stage}: before, every "
                     f"rank computes with the whole weights.")
    if parallel.zero_stage == 3 and train.compile:
        found.append("train.compile true does not work with parallel.zero_stage 3, whose hooks break every graph; set "
                     "compile to null or false, or take stage 2 or fsdp2.")
    if parallel.reshard != "always":
        found.append(f"parallel.reshard '{parallel.reshard}' is for parallel.engine 'fsdp2', not 'deepspeed'.")
    if train.precision == "fp64":
        found.append("train.precision 'fp64' needs parallel.engine 'fsdp2': DeepSpeed computes in fp32 or bf16.")
    return found


def _schedule(config: Config) -> list[str]:
    train, found = config.train, []
    decay = (train.decay_steps or 0) if train.schedule == "wsd" else 0
    if train.warmup_steps + decay > train.steps:
        terms = f"train.warmup_steps {train.warmup_steps}" + (f" + train.decay_steps {decay}" if decay else "")
        found.append(f"{terms} is more than train.steps {train.steps}.")
    if train.decay_steps is not None and train.schedule != "wsd":
        found.append(f"train.decay_steps {train.decay_steps} is set, but train.schedule is "
                     f"'{train.schedule}'; it applies to 'wsd' only.")
    return found


def _vocabulary(config: Config) -> list[str]:
    tokenizer, found = config.tokenizer, []
    trained = tokenizer.kind == "sentencepiece" and tokenizer.path is None
    if trained and tokenizer.vocab_size % 128:
        found.append(f"tokenizer.vocab_size {tokenizer.vocab_size} is not a multiple of 128; nearest: "
                     f"{max(5, round(tokenizer.vocab_size / 128)) * 128}.")
    if trained and tokenizer.vocab_size < 640:
        found.append(f"tokenizer.vocab_size {tokenizer.vocab_size} leaves no room: 256 special ids and 256 bytes "
                     f"come first; take at least 640.")
    if tokenizer.kind in ("tiktoken", "huggingface") and tokenizer.path is None:
        found.append(f"tokenizer.kind '{tokenizer.kind}' needs tokenizer.path: it is read from a file, not trained.")
    if tokenizer.kind in ("byte", "char") and tokenizer.path is not None:
        found.append(f"tokenizer.path is set, but tokenizer.kind '{tokenizer.kind}' takes no file.")
    known = vocabulary_size(config)
    if config.encode.dtype == "uint16" and known is not None and known > UINT16_IDS:
        found.append(f"encode.dtype uint16 holds ids up to {UINT16_IDS - 1}, but the vocabulary has {known}; "
                     f"take uint32 or auto.")
    if known is not None and config.model.vocab_size is not None and config.model.vocab_size < known:
        found.append(f"model.vocab_size {config.model.vocab_size} is smaller than the tokenizer's {known}.")
    return found


def vocabulary_size(config: Config) -> int | None:
    """Ids of the vocabulary where the configuration alone decides it, else None."""
    tokenizer = config.tokenizer
    if tokenizer.kind == "byte":
        return 256 + SPECIAL_IDS
    if tokenizer.kind == "sentencepiece" and tokenizer.path is None:
        return tokenizer.vocab_size
    return config.model.vocab_size if tokenizer.path is not None else None


def _sources(config: Config) -> list[str]:
    names = [source.name for source in config.shard.sources]
    found = [f"shard.sources has {count} sources named '{name}'; names must differ."
             for name, count in Counter(names).items() if count > 1]
    found += [f"the source name '{name}' in shard.sources must be letters, digits, '_' or '-': it becomes a file name."
              for name in names if not name.replace("_", "").replace("-", "").isalnum()]
    mixture = config.train.mixture
    if mixture is not None:
        unknown, missing = sorted(set(mixture) - set(names)), sorted(set(names) - set(mixture))
        if unknown:
            found.append(f"train.mixture names {', '.join(unknown)}, but the sources are {', '.join(names)}.")
        if missing:
            found.append(f"train.mixture says nothing of {', '.join(missing)}; write 0 to leave a source out.")
        if any(share < 0 for share in mixture.values()) or not sum(mixture.values()) > 0:
            found.append(f"train.mixture needs shares of 0 or more with a sum above 0, not {mixture}.")
    return found
