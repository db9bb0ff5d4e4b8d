"""A stage in the process of the test."""

from importlib import import_module

import torch.distributed as dist

from drover.pipeline.contract.entry import stage_main

FUNCTIONS = {"tokenizer": "make_tokenizer"}
"""Of stages whose function is not called as they are."""


def prepare_here(config):
    """Everything that training needs: the stages up to encode, with one worker, in a sixth of the time of commands."""
    for stage in ("shard", "tokenizer", "encode"):
        assert run_here(stage, config, "launch.processes=1") == 0


def run_here(stage, config, *arguments, body=None):
    """Run a stage, or `body` in its place; its exit status."""
    if body is None:
        body = getattr(import_module(f"drover.pipeline.{stage}"), FUNCTIONS.get(stage, stage))
    try:
        return stage_main(stage, body, ["--config", str(config), *arguments])
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
