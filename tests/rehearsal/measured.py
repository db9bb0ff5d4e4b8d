"""What ranks that are there tell each other and hold in a step: measured by the rehearsal's recorder on real tensors,
and by torch's profiler of what its allocator gives and takes."""

import contextlib
import pickle
from unittest import mock

from torch.profiler import ProfilerActivity, profile

from drover.pipeline.config.tree import Config
from drover.pipeline.rehearsal import replacements, step
from tests.model.varlen_on_cpu import NAME

MODEL = {"dim": 256, "layers": 4, "heads": 8, "kv_heads": 4, "vocab_size": 2048, "context_length": 1024}


def config_of(**settings):
    """A small run in bfloat16, of four sequences for each rank that has its own."""
    model, train = {**MODEL, **settings.pop("model", {})}, settings.pop("train", {})
    return Config.model_validate({"model": model, **settings, "train": {
        "sequence_length": 512, "batch_tokens": 8 * 512, "micro_batch": 1, "precision": "bf16", "steps": 2,
        "warmup_steps": 1, **train}})


def measured(ranks, gpu=True, **settings):
    """Of every rank, on rank 0; `allocated`: the most that torch's allocator had given out in a step, beyond what was
    there before it. gpu: with the kernel of GPUs, by its stand-in, whose own temporaries no GPU has."""
    config = config_of(**settings)
    on_gpus = step.as_on_gpus(config.train) if gpu else contextlib.nullcontext()
    with mock.patch.object(replacements, "NAME", NAME), on_gpus:
        decided, _, shape = step.rehearsable(config, ranks.world, gpu)
        result = step.take_step(decided, shape, ranks, all_micro_batches=True).as_json()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watching:
            step.take_step(decided, shape, ranks, all_micro_batches=True)
    mine = pickle.dumps({**result, "allocated": most(watching)})  # its records are none that ranks tell each other
    return {"ranks": [pickle.loads(part) for part in ranks.gather(mine)]}


def most(watching):
    """The largest sum of what was given less what was taken back."""
    events = [event for event in watching.profiler.kineto_results.events() if event.name() == "[memory]"]
    total = high = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        total += event.nbytes()
        high = max(high, total)
    return high
