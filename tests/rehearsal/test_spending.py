"""What spare memory is spent on: lost time is counted as by hand, and the search takes what saves most of it."""

from collections import Counter
from itertools import pairwise
from types import SimpleNamespace

import pytest

from drover.model.config import ModelConfig
from drover.pipeline.config.launching import LaunchConfig, TrainResources
from drover.pipeline.config.loading import load_config
from drover.pipeline.config.parallel import ParallelConfig
from drover.pipeline.config.training import KEPT_ACTIVATIONS, TrainConfig
from drover.pipeline.config.tree import Config
from drover.pipeline.core.errors import NotRehearsedError
from drover.pipeline.rehearsal import fitting
from drover.pipeline.rehearsal.fitting import TIGHT
from drover.pipeline.rehearsal.lost_time import FLOPS, NETWORK_BYTES, NODE_BYTES, lost, recomputed_flops
from drover.pipeline.rehearsal.report import Rehearsal
from drover.pipeline.rehearsal.spending import changes, spend
from drover.pipeline.rehearsal.traffic import Channel, Traffic
from drover.tools.rehearse import main
from tests.rehearsal.published_table import PUBLISHED

SHAPE = ModelConfig(dim=64, layers=8, heads=4, kv_heads=2, ffn_dim=96, vocab_size=128, context_length=256)


def config_of(parallel=None, gpus_per_node=8, **train):
    return Config(model=SHAPE, parallel=ParallelConfig(**parallel or {}),
                  launch=LaunchConfig(gpus_per_node=gpus_per_node),
                  train=TrainConfig(**{"sequence_length": 256, "micro_batch": 2, "batch_tokens": 256 * 64, **train}))


def rehearsal(peak=0, ranks=16, **sizes):
    """One whose collectives have these bytes, by `group_operation`, in groups of two."""
    channels = {Channel(*name.split("_"), 2): size for name, size in sizes.items()}
    return Rehearsal(0, ranks, "", SimpleNamespace(bytes=peak), Traffic(Counter(channels), Counter(channels)), {}, {})


def test_recomputed_operations_are_those_of_what_is_not_kept_but_for_w2():
    forward = (SHAPE.flops_per_token(256, causal=True) - 6 * 128 * 64) / 3  # of all blocks
    full = config_of(activation_checkpointing="full").train
    assert recomputed_flops(full, SHAPE) == pytest.approx(forward - 2 * 8 * 64 * 96)
    assert recomputed_flops(full.model_copy(update={"recomputed_blocks": 4}), SHAPE) == pytest.approx(
        recomputed_flops(full, SHAPE) / 4)
    assert recomputed_flops(config_of(activation_checkpointing="selective").train, SHAPE) == 0
    assert recomputed_flops(config_of().train, SHAPE) == 0
    some = config_of(activation_checkpointing="selective", kept_activations=["attention", "wq", "wk", "wv", "w1"])
    assert recomputed_flops(some.train, SHAPE) == 2 * 8 * (64 * 64 + 64 * 96)


TENSOR, CONTEXT, PIPELINE = {"tp": 2}, {"cp": 2}, {"pp": 2}


@pytest.mark.parametrize(("parallel", "gpus_per_node", "train", "channel", "rate", "times", "exposed"), [
    (TENSOR, 8, {}, "tensor_all-gather", NODE_BYTES, 1, 0.5), (TENSOR, 8, {}, "tensor_all-reduce", NODE_BYTES, 1, 1),
    (TENSOR, 1, {}, "tensor_all-gather", NETWORK_BYTES, 1, 0.5),
    # Half of the sums is made backward, while products for weights' gradients run: a third of all.
    (TENSOR, 8, {}, "tensor_reduce-scatter", NODE_BYTES, 4, 1 + (1 - 1 / 3)),
    (TENSOR, 8, {"compile": False}, "tensor_reduce-scatter", NODE_BYTES, 4, 2),
    (CONTEXT, 8, {}, "context_reduce-scatter", NODE_BYTES, 0.5, 0),
    (CONTEXT, 8, {"activation_checkpointing": "selective"}, "context_reduce-scatter", NODE_BYTES, 0.5, 0.25),
    (TENSOR, 8, {}, "shard_all-gather", NETWORK_BYTES, 2, 0), (TENSOR, 8, {}, "shard_all-gather", NETWORK_BYTES, 6, 2),
    (PIPELINE, 4, {}, "shard_all-gather", NETWORK_BYTES, 1, 0.5),
    (PIPELINE, 4, {}, "pipeline_send", NETWORK_BYTES, 1, 1),
    (PIPELINE, 4, {}, "pipeline_receive", NETWORK_BYTES, 1, 0),
    # The backward pass of the last of four micro-batches hides some.
    (PIPELINE, 4, {}, "shard_reduce-scatter", NETWORK_BYTES, 1, 1 / 2 - 2 / 3 / 4)])
def test_collectives_that_products_hide_cost_only_what_is_longer(parallel, gpus_per_node, train, channel, rate, times,
                                                                 exposed):
    """times: how often the bytes of the channel take as long as the products. Nodes have the GPUs that train requests,
    or that all stages do."""
    products_s = 256 * 64 / 16 * SHAPE.flops_per_token(256, causal=True) / FLOPS
    own = LaunchConfig(gpus_per_node=3, train=TrainResources(gpus_per_node=gpus_per_node))
    for config in (config_of(parallel, gpus_per_node, **train),
                   config_of(parallel, **train).model_copy(update={"launch": own})):
        found = lost(config, rehearsal(**{channel: times * rate * products_s}))
        assert found.exchanging == pytest.approx(exposed) and found.waiting == (1 / 4 if parallel is PIPELINE else 0)
        assert found.time == pytest.approx((1 + exposed) * (1 + found.waiting))


def test_the_search_goes_where_most_time_is_saved_and_all_fits(monkeypatch):
    """Memory and exchanged bytes are made up: each setting takes its own, and another micro-batch halves the bytes."""
    config, told = config_of(gpus_per_node=1, activation_checkpointing="full"), []
    a_step = 2 * NETWORK_BYTES * 256 * 64 / 16 * SHAPE.flops_per_token(256, causal=True) / FLOPS  # bytes, among two

    def rehearsed(changed, ranks, numbers, gpu):
        train = changed.train
        if changed.parallel.reduce == "last":
            raise NotRehearsedError("no memory here")
        peak = 10 * train.micro_batch + {"full": 0, "selective": 30, "none": 70}[train.activation_checkpointing]
        return [rehearsal(peak + 5 * (changed.parallel.reshard == "never"), ranks,
                          **{"shard_all-gather": 4 * a_step / train.micro_batch})]
    monkeypatch.setattr(fitting, "rehearse_apart", rehearsed)
    path = spend(config, 16, 100, told.append)
    assert path[0].settings == {} and [layout.peak for layout in path] == sorted(layout.peak for layout in path)
    assert path[-1].settings == {"train.micro_batch": 4, "train.activation_checkpointing": "selective",
                                 "train.recomputed_blocks": 1, "train.kept_activations": [*KEPT_ACTIVATIONS]}
    assert path[-1].peak == 70 and told[0].startswith("as configured: 20 B, 0.0% waiting, ")
    assert any("activation_checkpointing=none" in line and ": 110 B" in line for line in told)
    assert "parallel.reduce=last: not rehearsed: no memory here" in told
    assert all(after.lost.time < before.lost.time for before, after in pairwise(path))
    told.clear()  # where nothing is lost, nothing else is rehearsed
    monkeypatch.setattr(fitting, "rehearse_apart", lambda *given, **options: [rehearsal()])
    assert len(spend(config_of(), 16, 100, told.append)) == len(told) == 1


def test_what_is_recomputed_is_kept_group_by_group():
    full = [one.get("train.kept_activations") for one in changes(config_of(activation_checkpointing="full"), 1)]
    assert full[:2] == [["attention"], ["attention", "wq", "wk", "wv", "wo", "w1", "w3"]] and not any(full[2:])
    some = changes(config_of(activation_checkpointing="selective", kept_activations=["attention", "wk"]), 1)
    assert [one["train.kept_activations"][2:] for one in some if "train.kept_activations" in one] == [
        ["wo"], ["wq", "wv"], ["w1", "w3"]]


def test_a_pipeline_gets_more_stages_up_to_its_layers():
    found = list(changes(config_of({"pp": 2, "pp_schedule": "interleaved", "pp_stages": 2}), 2))
    assert [one["parallel.pp_stages"] for one in found if "parallel.pp_stages" in one] == [3, 4]


@pytest.mark.slow
def test_the_command_shows_what_it_tried_and_what_is_best(capsys):
    demo = ["--config", "configs/demo.yaml", "--ranks", "2", "--spend", "model.vocab_size=4096",
            "train.activation_checkpointing=full"]
    assert main(demo) == 2 and "--spend needs --memory" in capsys.readouterr().err
    assert main([*demo, "--memory", "80"]) == 0
    said = capsys.readouterr().out
    assert "as configured: " in said and "a step takes 1.000 x its products" in said.partition("\nbest       ")[2]
    assert main([*demo, "--memory", "0.01"]) == 1 and "None of these fits" in capsys.readouterr().out


@pytest.mark.parametrize("path, ranks, settings", [
    pytest.param(*row, marks=pytest.mark.soak if row[1] > 64 else pytest.mark.slow) for row in PUBLISHED])
def test_a_shipped_recipe_is_the_best_that_the_search_finds(path, ranks, settings):
    """On GPUs of 80 GB. Those with pipelines take half an hour: all of their micro-batches are rehearsed."""
    config = load_config(path, settings)
    path = spend(config, ranks, 80e9, print)
    assert [layout.settings for layout in path] == [{}] and path[0].peak <= TIGHT * 80e9
