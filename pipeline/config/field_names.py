"""What other libraries call our settings, so that a name from there is answered with the one here."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from drover.pipeline.config.tree import Config

ELSEWHERE = {
    "train": "training",
    "train.steps": "max_steps num_steps total_steps train_steps num_train_steps train_iters max_iters num_iterations "
                   "iterations epochs num_epochs num_train_epochs",
    "train.sequence_length": "seq_len seq_length max_seq_len max_seq_length block_size max_length context_length",
    "train.batch_tokens": "batch_size global_batch_size train_batch_size global_batch total_batch_size "
                          "tokens_per_batch",
    "train.micro_batch": "micro_batch_size per_device_train_batch_size device_batch_size local_batch_size "
                         "train_micro_batch_size_per_gpu gradient_accumulation gradient_accumulation_steps "
                         "grad_accum_steps accumulation accumulate_grad_batches",
    "train.optimizer": "optim optimiser optim_type optimizer_type optimizer_name",
    "train.optimizer_settings": "optimizer_args optimizer_kwargs optim_args optimizer_params momentum nesterov",
    "train.lr_factors": "lr_multipliers lr_mult lr_scales param_groups",
    "train.lr": "learning_rate max_lr peak_lr base_lr max_learning_rate",
    "train.min_lr_share": "min_lr min_learning_rate lr_min final_lr min_lr_ratio lr_end",
    "train.warmup_steps": "warmup warmup_iters num_warmup_steps lr_warmup_steps lr_warmup_iters warmup_ratio",
    "train.schedule": "lr_scheduler lr_scheduler_type lr_schedule scheduler lr_decay_style decay_type",
    "train.decay_steps": "lr_decay_steps lr_decay_iters cooldown_steps decay_iters",
    "train.beta1": "adam_beta1 beta_1 b1 betas",
    "train.beta2": "adam_beta2 beta_2 b2",
    "train.eps": "adam_epsilon adam_eps epsilon",
    "train.weight_decay": "wd decay l2",
    "train.clip_norm": "grad_clip max_grad_norm clip_grad gradient_clip gradient_clipping gradient_clip_val "
                       "clip_grad_norm max_norm clip",
    "train.precision": "dtype mixed_precision bf16 fp16 fp8 float8 amp param_dtype",
    "train.activation_checkpointing": "gradient_checkpointing activation_checkpoint recompute recompute_granularity ac",
    "train.attention": "attn_implementation attention_backend attn_type attn_impl",
    "train.flash": "flash_attention use_flash_attn flash_attn",
    "train.compile": "torch_compile",
    "train.loader_threads": "num_workers dataloader_num_workers",
    "train.log_every": "log_interval logging_steps log_freq log_every_n_steps",
    "train.heldout_every": "eval_every eval_interval eval_steps val_check_interval val_interval",
    "train.checkpoint.every_steps": "save_every save_steps save_interval checkpoint_every checkpoint_interval",
    "train.checkpoint.keep": "save_total_limit keep_last keep_latest_k",
    "train.guards": "spike_detection",
    "train.mixture": "data_mix data_weights mixture_weights weights",
    "model.dim": "hidden_size d_model n_embd emb_dim embed_dim width",
    "model.layers": "num_layers n_layers n_layer num_hidden_layers depth",
    "model.heads": "num_heads n_heads n_head num_attention_heads",
    "model.kv_heads": "num_key_value_heads n_kv_heads num_kv_heads num_query_groups",
    "model.head_dim": "d_head head_size kv_channels",
    "model.qkv_bias": "attention_bias add_qkv_bias attn_bias",
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
    "parallel.async_tp": "enable_async_tensor_parallel async_tensor_parallel tp_comm_overlap",
    "parallel.timeout_minutes": "nccl_timeout distributed_timeout_minutes ddp_timeout dist_timeout "
                                "init_timeout_seconds train_timeout_seconds",
    "parallel.dp_replicate": "data_parallel_replicate_degree replicas",
    "parallel.dp_shard": "data_parallel_shard_degree fsdp_size",
    "parallel.zero_stage": "zero zero_optimization stage",
    "parallel.offload": "cpu_offload",
    "shard": "data dataset datasets",
    "shard.sources": "data dataset datasets corpus",
    "tokenizer.path": "tokenizer_path model_path tokenizer_model name_or_path",
    "tokenizer.vocab_size": "vocabulary_size",
    "launch": "slurm cluster launcher",
    "launch.cpus": "cpus_per_task",
    "launch.mem": "memory memory_gb mem_gb",
    "launch.time": "time_minutes timeout walltime time_limit",
    "launch.gpus_per_node": "gpus ngpus_per_node",
    "launch.train.nodes": "nodes num_nodes nnodes",
    "launch.processes": "nproc_per_node num_processes world_size",
    "evaluate": "eval evaluation lm_eval",
    "evaluate.tasks": "task",
    "runs_dir": "output_dir out_dir save_dir checkpoint_dir work_dir root",
    "name": "run_name experiment experiment_name exp_name",
    "seed": "random_seed manual_seed",
}
"""Our key: names of the same, or nearly the same, in transformers, torchtitan, Megatron-LM, nanoGPT, litgpt, DeepSpeed,
Lightning and others."""
MEANINGS = {
    "train.batch_tokens": "counted in tokens: sequences x train.sequence_length",
    "train.micro_batch": "the most sequences of a rank at once; accumulation follows from batch and ranks",
    "train.min_lr_share": "a share of lr", "train.steps": "optimizer steps; epochs are not counted in",
    "train.warmup_steps": "in steps",
}
_KEYS: dict[str, list[str]] = {}
for _key, _names in ELSEWHERE.items():
    for _name in _names.split():
        _KEYS.setdefault(_name, []).append(_key)


def suggestion(section: str, name: str, known: list[str]) -> tuple[str, str | None]:
    """What to say of the unknown key `name` in `section` ("" at the top), whose keys are `known`; and the setting that
    was meant, dotted, where one can be guessed."""
    inside = f"{section}." if section else ""
    meant = _KEYS.get(name.lower().replace("-", "_"), [])
    here = [key for key in meant if key.rpartition(".")[0] == section]
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    very_close = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
    elsewhere = [key for key in all_keys() if key.rpartition(".")[2] == name]
    if very_close and not here:
        return f"did you mean '{very_close[0]}'?", inside + very_close[0]
    if here:
        return f"did you mean '{here[0].rpartition('.')[2]}'{_meaning(here[0])}?", here[0]
    if meant:
        return f"here that is '{meant[0]}'{_meaning(meant[0])}.", meant[0]
    if len(elsewhere) == 1:
        return f"did you mean '{elsewhere[0]}'?", elsewhere[0]
    if close:
        return f"did you mean '{close[0]}'?", inside + close[0]
    return f"known here: {', '.join(known)}.", None


def all_keys() -> list[str]:
    """Every setting and section of the configuration, dotted, without those of items of lists."""
    return list(_keys_of(Config, ""))


def _keys_of(section: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield prefix + name
        for candidate in (field.annotation, *get_args(field.annotation)):
            if _is_section(candidate) and get_origin(field.annotation) is not list:
                yield from _keys_of(candidate, f"{prefix}{name}.")


def _is_section(candidate: Any) -> bool:
    return isinstance(candidate, type) and issubclass(candidate, BaseModel)


def _meaning(key: str) -> str:
    return f" ({MEANINGS[key]})" if key in MEANINGS else ""
