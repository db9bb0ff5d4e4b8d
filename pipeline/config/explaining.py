"""What a setting means: `drover explain train.lr`, `drover explain train`, or `drover explain` for everything.
And which setting a wrong name may mean."""

from __future__ import annotations

import ast
import difflib
import inspect
import textwrap
from collections.abc import Collection, Iterator
from itertools import pairwise
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from drover.pipeline.config.kinds import Kind, imported
from drover.pipeline.config.section import EXTERNAL, is_execution, keys_of, section_of, sections_in
from drover.pipeline.config.shipped import FILTERS, HOOKS, OPTIMIZERS, SINKS
from drover.pipeline.config.tree import Config, changed
from drover.pipeline.core.errors import UserError

ELSEWHERE = {
    "train": "training",
    "train.steps": "max_steps num_steps total_steps train_steps num_train_steps train_iters max_iters num_iterations "
                   "iterations epochs num_epochs num_train_epochs target_param_data_ratio target_flops max_tokens",
    "train.sequence_length": "seq_len seq_length max_seq_len max_seq_length block_size max_length context_length "
                             "max_context_length",
    "train.batch_tokens": "batch_size global_batch_size train_batch_size global_batch total_batch_size "
                          "tokens_per_batch num_tokens_per_train_step",
    "train.micro_batch": "micro_batch_size per_device_train_batch_size device_batch_size local_batch_size "
                         "train_micro_batch_size_per_gpu gradient_accumulation gradient_accumulation_steps "
                         "grad_accum_steps accumulation accumulate_grad_batches "
                         "num_tokens_per_microbatch_per_dp_rank",
    "train.optimizer": "optim optimiser optim_type optimizer_type optimizer_name",
    "train.optimizer_settings": "optimizer_args optimizer_kwargs optim_args optimizer_params momentum nesterov",
    "train.param_groups": "lr_factors lr_multipliers lr_mult lr_scales",
    "train.mup_base_width": "mup use_mup parametrization mup_base_dim base_width",
    "train.lr": "learning_rate max_lr peak_lr base_lr max_learning_rate matrix_lr embedding_lr unembedding_lr "
                "scalar_lr",
    "train.min_lr_share": "min_lr min_learning_rate lr_min final_lr min_lr_ratio lr_end min_lr_factor final_lr_frac",
    "train.warmup_steps": "warmup warmup_iters num_warmup_steps lr_warmup_steps lr_warmup_iters warmup_ratio "
                          "lr_warmup_fraction",
    "train.schedule": "lr_scheduler lr_scheduler_type lr_schedule scheduler lr_decay_style decay_type",
    "train.decay_steps": "warmdown_ratio lr_decay_steps lr_decay_iters cooldown_steps decay_iters decay_ratio",
    "train.beta1": "adam_beta1 beta_1 b1 betas",
    "train.beta2": "adam_beta2 beta_2 b2",
    "train.eps": "adam_epsilon adam_eps epsilon",
    "train.weight_decay": "wd decay l2",
    "train.clip_norm": "grad_clip max_grad_norm clip_grad gradient_clip gradient_clipping gradient_clip_val "
                       "clip_grad_norm max_norm clip",
    "train.precision": "dtype mixed_precision bf16 fp16 fp8 float8 amp param_dtype mixed_precision_param "
                       "mixed_precision_reduce torch_dtype",
    "train.activation_checkpointing": "gradient_checkpointing activation_checkpoint recompute recompute_granularity "
                                      "recompute_activations selective_ac_option ac",
    "train.attention": "attn_implementation attention_backend attn_type attn_impl",
    "train.flash": "flash_attention use_flash_attn flash_attn",
    "train.compile": "torch_compile",
    "train.loader_threads": "num_workers dataloader_num_workers",
    "train.log_every": "log_interval logging_steps log_freq log_every_n_steps",
    "shard.validation_share": "heldout_share val_share val_ratio valid_split val_split validation_split split "
                              "validation_split_percentage validation_file val_data_path",
    "shard.validation_rule": "heldout_rule",
    "train.validation_tokens": "heldout_tokens eval_tokens val_tokens eval_iters",
    "evaluate.validation_tokens": "heldout_tokens",
    "train.validation_every": "validator validation heldout_every eval_every eval_interval eval_steps "
                              "val_check_interval val_interval eval_strategy evaluation_strategy",
    "train.checkpoint.every_steps": "checkpoint save_every save_steps save_interval save_strategy checkpoint_every "
                                    "checkpoint_interval interval",
    "train.checkpoint.keep": "save_total_limit keep_last keep_latest_k",
    "train.init_from": "initial_load_path initial_checkpoint_dir model_name_or_path load",
    "train.profile": "profiling profiler enable_profiling profile_freq",
    "train.log_to": "enable_tensorboard enable_wandb report_to logger_name tensorboard wandb mlflow logging",
    "train.guards": "spike_detection",
    "train.mixture": "data_mix data_weights mixture_weights weights",
    "model.preset": "flavor model_name model_config config_name",
    "model.dim": "hidden_size d_model n_embd emb_dim embed_dim width aspect_ratio",
    "model.layers": "num_layers n_layers n_layer num_hidden_layers depth",
    "model.heads": "num_heads n_heads n_head num_attention_heads",
    "model.kv_heads": "num_key_value_heads n_kv_heads num_kv_heads num_query_groups",
    "model.head_dim": "d_head head_size kv_channels",
    "model.ffn_dim": "intermediate_size ffn_hidden_size d_ff hidden_dim mlp_dim",
    "model.context_length": "max_position_embeddings max_seq_len seq_len seq_length block_size context_size n_ctx "
                            "sequence_length",
    "model.rope_theta": "rope_base rotary_base",
    "model.tied_embeddings": "tie_word_embeddings tie_embeddings weight_tying",
    "model.norm_eps": "rms_norm_eps norm_epsilon layer_norm_eps",
    "convert.average": "ema ema_decay checkpoint_averaging weight_averaging swa polyak",
    "parallel": "distributed parallelism fsdp deepspeed",
    "parallel.tp": "tensor_parallel tensor_parallel_size tensor_parallel_degree tp_size "
                   "tensor_model_parallel_size",
    "parallel.pp": "pipeline_parallel pipeline_parallel_size pipeline_parallel_degree pp_size "
                   "pipeline_model_parallel_size",
    "parallel.pp_schedule": "pipeline_parallel_schedule pp_engine",
    "parallel.pp_stages": "virtual_pipeline_model_parallel_size num_virtual_stages_per_rank",
    "parallel.cp": "context_parallel context_parallel_size context_parallel_degree cp_size cp_degree",
    "parallel.timeout_minutes": "nccl_timeout distributed_timeout_minutes ddp_timeout dist_timeout "
                                "init_timeout_seconds train_timeout_seconds",
    "parallel.dp_replicate": "data_parallel_replicate_degree replicas",
    "parallel.dp_shard": "data_parallel_shard_degree fsdp_size",
    "parallel.zero_stage": "zero zero_optimization stage",
    "parallel.offload": "cpu_offload enable_cpu_offload",
    "parallel.reshard": "reshard_after_forward fsdp_reshard_after_forward",
    "shard": "data dataset datasets",
    "shard.sources": "data dataset datasets corpus dataset_path dataset_name data_path data_dir train_data_path "
                     "train_file",
    "tokenizer.path": "tokenizer_path model_path tokenizer_model name_or_path hf_assets_path tokenizer_dir "
                      "tokenizer_name vocab_file",
    "tokenizer.kind": "tokenizer_type",
    "tokenizer.vocab_size": "vocabulary_size",
    "launch": "slurm cluster launcher",
    "launch.cpus": "cpus_per_task",
    "launch.mem": "memory memory_gb mem_gb",
    "launch.time": "time_minutes timeout walltime time_limit",
    "launch.gpus_per_node": "gpus ngpus_per_node devices",
    "launch.train.nodes": "nodes num_nodes nnodes",
    "launch.processes": "nproc_per_node num_processes world_size preprocessing_num_workers",
    "evaluate": "eval evaluation lm_eval",
    "evaluate.tasks": "task",
    "evaluate.batch": "per_device_eval_batch_size eval_batch_size",
    "evaluate.every": "core_metric_every",
    "evaluate.task_limit": "core_metric_max_per_task",
    "runs_dir": "output_dir out_dir save_dir checkpoint_dir work_dir root dump_folder",
    "name": "run run_name model_tag experiment experiment_name exp_name resume resume_from_step resume_from_checkpoint "
            "overwrite_output_dir",
    "seed": "random_seed manual_seed",
}
"""Our key: names of the same or nearly the same setting in transformers, torchtitan, Megatron-LM, nanoGPT, litgpt,
DeepSpeed, Lightning and others."""
MEANINGS = {
    "train.batch_tokens": "counted in tokens: sequences x train.sequence_length",
    "train.micro_batch": "the most sequences of a rank at once; accumulation follows from batch and ranks",
    "train.min_lr_share": "a share of lr", "train.steps": "optimizer steps, not epochs",
    "train.warmup_steps": "in steps", "train.decay_steps": "in steps", "train.precision": "fp32, bf16 or fp8",
    "model.preset": "`drover presets` lists them", "shard.sources": "a list, such as [{kind: hf, dataset: ...}]",
    "train.optimizer": "in lower case", "train.beta1": "the second one is train.beta2",
    "train.log_to": "[tensorboard], [wandb] or [mlflow]; docs/logging.md", "launch": "docs/slurm.md",
    "name": "the same command continues the run of this name",
}
WITHOUT_MEANING = ("name", "type", "kind", "mode", "enable", "freq")
"""Names that say nothing without their section."""


def suggestion(key: str, known: Collection[str]) -> str:
    """A hint for an unknown setting, whose section has the keys `known`: none if that is unknown, too."""
    section, _, name = key.rpartition(".")
    called = settings_meant(key)
    close = [f"{section}.{one}".strip(".") for one in difflib.get_close_matches(name, known, n=1, cutoff=0.5)]
    for best in called + close + ([] if known else settings_called(section)):
        return f"did you mean '{best}'{f' ({MEANINGS[best]})' if best in MEANINGS else ''}?"
    return f"known here: {', '.join(known or Config.model_fields)}."


def settings_meant(key: str) -> list[str]:
    """The settings and sections that a dotted name may mean, those first that lie where its section does: another
    project's section may be `training`, and its `optimizer.name` our `train.optimizer`."""
    section, _, name = key.rpartition(".")
    places = settings_called(section.rpartition(".")[2]) if section else []
    if places and name in WITHOUT_MEANING:
        return places
    called = settings_called(name)
    exact = {f"{place}.{name}" for place in (section, *places)}.intersection(called)
    return sorted(exact or called, key=lambda ours: not ours.startswith((f"{section}.", *places)))


def settings_called(name: str) -> list[str]:
    """The settings and sections that a name may mean: those that it or the end of their name is, then those that other
    programs call so."""
    name = name.lower().replace("-", "_")
    return [*(ours for ours in keys_of(Config) if name in (ours, ours.rpartition(".")[2])),
            *(ours for ours, theirs in ELSEWHERE.items() if name in theirs.split())]


LIMITS = ("gt", "ge", "lt", "le", "min_length", "max_length", "pattern")
"""Arguments of fields that are shown with their types."""


def explain(config: Config | None, key: str = "") -> str:
    """The documentation, type, default and, with a configuration, current value of the setting or section `key` ("" for
    all).

    Raises:
        UserError: no such key; names the one that may be meant. Or `key` is of filters, loggers or hooks, and one of
            your own cannot be imported or has wrong settings.
    """
    if key == "model.preset":  # gone from a configuration that is loaded: it spells the shape
        from drover.model.presets import PRESETS

        return (f"{key}\n  A shape, which the section's other keys override: a folder with weights (a run, a "
                f"checkpoint, a Hugging Face folder), or one of {', '.join(PRESETS)}.")
    for kinds in (FILTERS, SINKS, HOOKS):
        if config and key.startswith(kinds.setting):  # only now is code of the user's own needed, and imported
            section, _, name = kinds.setting.partition(".")
            config = changed(config, {kinds.setting: kinds.made(getattr(config.part(section), name))})
    entries = dict(_entries(Config, config, ""))
    chosen = [text for name, text in entries.items() if not key or name == key or name.startswith(f"{key}.")]
    if not chosen:
        section = key.rpartition(".")[0]
        known = [leaf for at, _, leaf in (name.rpartition(".") for name in entries) if at == section]
        raise UserError(f"There is no setting '{key}'; {suggestion(key, known)} `drover explain` without a name prints "
                        f"them all.")
    return "\n\n".join(chosen)


def field_texts(section: type[BaseModel]) -> dict[str, tuple[str, str]]:
    """For each field of a section and of its base classes: its type with limits, and the text under it.

    Read here and not by pydantic (`use_attribute_docstrings`), which would parse the source in every process.
    """
    texts: dict[str, tuple[str, str]] = {}
    for owner in reversed(section.__mro__[:section.__mro__.index(BaseModel)]):
        [definition] = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
        assert isinstance(definition, ast.ClassDef)
        for field, text in pairwise(definition.body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                limits = field.value.keywords if isinstance(field.value, ast.Call) else []
                kind = ", ".join(map(ast.unparse, [field.annotation, *(one for one in limits if one.arg in LIMITS)]))
                texts[ast.unparse(field.target)] = kind, " ".join(str(text.value.value).split())
    return texts


def _entries(section: type[BaseModel], value: Any, prefix: str, execution: bool = False) -> Iterator[tuple[str, str]]:
    """value: None for the settings of a kind of which the configuration has no item.
    execution: nothing in the section decides what is computed."""
    texts = field_texts(section)
    for name, field in section.model_fields.items():
        key = f"{prefix}{name}"
        current = getattr(value, name, None)
        how = execution or is_execution(field)
        kind, text = texts.get(name, (inspect.formatannotation(field.annotation), "(no text stands under it)"))
        if (nested := section_of(field)) is not None:
            yield key, f"{key}: {text}"
            yield from _entries(nested, current, f"{key}.", how)
            yield from _kinds(key, field)
            continue
        default = "required" if field.is_required() else repr(field.get_default(call_default_factory=True))
        items = current if isinstance(current, list) and current and isinstance(current[0], BaseModel) else []
        now = "" if value is None else f"   configured: {f'{len(items)} item(s), below' if items else repr(current)}"
        stale = "\n  (the path makes nothing stale; the content does)" if name in EXTERNAL else \
            "\n  (how the work is done; never makes a finished stage stale)" if how else ""
        yield key, f"{key}\n  {text}\n  type: {kind}   default: {default}{now}{stale}"
        for index, item in enumerate(items):
            yield from _entries(type(item), item, f"{key}.{index}.")
        yield from _kinds(key, field)


def _kinds(key: str, field: FieldInfo) -> Iterator[tuple[str, str]]:
    """Entries of each kind of item that the setting `key` takes, as `shard.sources.files.text_field`; of items without
    kinds as `train.phases.until`."""
    kinds = [(f"{key}.{name}", imported(place, key)) for of in (FILTERS, SINKS) if of.setting == key
             for name, place in of.shipped.items()]
    for section in sections_in(field.annotation) if not kinds else ():
        if section is not section_of(field) and section is not Kind:
            named = section.model_fields.get("kind")
            kinds.append((f"{key}.{get_args(named.annotation)[0]}" if named else key, section))
    for name, section in kinds:
        if name != key:
            yield name, f"{name}: {' '.join(str(inspect.getdoc(section)).split())}"
        yield from _entries(section, None, f"{name}.")
    for name, kind in OPTIMIZERS.items() if key == "train.optimizer" else ():
        yield f"{key}.{name}", (f"{key}.{name}: under parallel.engine {' and '.join(kind.engines)}; "
                                f"train.optimizer_settings {dict(kind.settings)}")
