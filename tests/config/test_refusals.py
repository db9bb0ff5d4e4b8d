"""What a configuration is refused for, and in which words: a line each."""

import pytest

from drover.model.attention import BACKENDS
from drover.pipeline.config.checks import rank_problems
from drover.pipeline.config.loading import load_config
from tests.config.files import refusal
from tests.refusal import table

BASE = """
model: {dim: 64, layers: 4, heads: 4, kv_heads: 2, context_length: 256}
tokenizer: {kind: byte}
"""
REFUSED = """
trian.steps=4 -> the command line (trian.steps=4): unknown key 'trian.steps'; did you mean 'train.steps'
trian={steps: 4, lr: 1} -> unknown key 'trian'; did you mean 'train'?
training.steps=4 -> did you mean 'train.steps'
optimizer.name=AdamW -> did you mean 'train.optimizer' (in lower case)?
train.seq_len=1 -> did you mean 'train.sequence_length'?
optimizer.lr=1 -> did you mean 'train.lr'?
activation_checkpoint.mode=full -> did you mean 'train.activation_checkpointing'?
xy.zy=1 -> known here: name, runs_dir
train.steps=many -> 'train.steps' is 'many' (str)
train.steps=1.5 -> 'train.steps' is 1.5 (float)
train.steps=1e-3 -> 'train.steps' is 0.001 (float)
train.steps=1e999 -> 'train.steps' is inf (float)
train.steps=true -> 'train.steps' is True (bool)
train.steps=0 -> greater than 0
train.steps=1e308 -> 'train.steps' is 1e+308 (float)
train.batch_tokens=999999999999T -> 'train.batch_tokens'
model=5 -> 'model' is 5 (int)
model=[preset] -> 'model' is ['preset'] (list)
launch.time=99999999999999999 -> longer than Slurm counts
launch.mem=64GiB -> 'launch.mem': '64GiB' must be a number of megabytes, or a number with K
launch.mem=-4 -> 'launch.mem': '-4' must be a number of megabytes
launch={account: 17} -> 'launch.account' is 17 (int): input should be a valid string; write it in quotes.
launch.environment={A: true} -> write it in quotes.
train.schedule=linear -> 'cosine' or 'wsd'
tokenizer.kind=BPE -> 'byte' or 'char'; did you mean 'tokenizer.kind=bpe'?
shard.sources=[{kind: Files, name: x, paths: [y]}] -> 'hf'; did you mean 'shard.sources.0.kind=files'?
shard.filters=[Length] -> did you mean 'length'?
train.lr=many; train.optimizer=Muon -> 2 problems
train.lr=many; train.optimizer=Muon -> train.optimizer 'Muon' is not known; did you mean 'train.optimizer=muon'? Take
name=a/b -> name
train.lr=nan -> train.lr
train.lr=1e999 -> finite
train -> is not an override
train.lr=[ -> not valid YAML
shard.sources=[{kind: web, name: x}] -> shard.sources.0
shard.sources=[{kind: files, paths: [y]}] -> 'shard.sources.0.name' is missing
shard.sources=[{kind: files, name: x, paths: [y], formatt: txt}] -> did you mean 'shard.sources.0.format'
shard.sources=[] -> shard.sources
shard.sources=[{kind: files, name: x, paths: [y], encoding: klingon}] -> klingon is no encoding of text
shard.sources=[{kind: files, name: x, paths: [y], encoding: rot13}] -> rot13 is no encoding of text
evaluate.every=50 -> evaluate.every 50 is not a multiple of train.checkpoint.every_steps 100 up to train.steps
evaluate.every=2000 -> evaluate.every 2000 is not a multiple
evaluate.tasks=mine -> 'evaluate.tasks' is 'mine' (str): input should be a valid list; write [a, b].
shard.sources.1={} -> 'shard.sources' is {'1': {}} (dict): input should be a valid list
train.phases=[{until: 1M, seq_len: 5}] -> unknown key 'train.phases.0.seq_len'
train.phases=[{lr: 1, until: many}] -> 'train.phases.0.until' is 'many'
train.steps=7; train.phases=[{until: 20k}] -> train.steps 7 is not the number of steps in train.phases, 2. Leave it out
shard.filters=[{kind: site, drop: [a.org]}] -> site judges stdlib by url, a field that its documents do not have
train.steps=12 -> train.warmup_steps 50 is more than train.steps 12. Take fewer (train.warmup_steps=1), or train
train.prompts=[a]; train.prompts.1=b -> the list train.prompts has 1 items, counted from 0

train.lr=0,01 -> is '0,01' (str): input should be a valid number; write 0.01.
train= -> 'train' is None (NoneType): this is a section; write its settings below it, indented, or leave it out.
final-lr-frac=0.1 -> did you mean 'train.min_lr_share' (a share of lr)?
run=d24 -> did you mean 'name' (the same command continues the run of this name)?
training.dataset_path=x -> did you mean 'shard.sources'
train.betas=[1, 2] -> did you mean 'train.beta1' (the second one is train.beta2)?
model_name_or_path=x -> did you mean 'train.init_from'?
train.learning_rate=1 -> unknown key 'train.learning_rate'; did you mean 'train.lr'?
train.lrr=1 -> unknown key 'train.lrr'; did you mean 'train.lr'?
train.batch_size=1 -> did you mean 'train.batch_tokens' (counted in tokens
train.wd=1 -> did you mean 'train.weight_decay'?
train.weightdecay=1 -> did you mean 'train.weight_decay'?
train.seq_len=1 -> did you mean 'train.sequence_length'?
model.seq_len=1 -> did you mean 'model.context_length'?
train.grad_clip=1 -> did you mean 'train.clip_norm'?
train.max_steps=1 -> did you mean 'train.steps' (optimizer steps
train.warmup=1 -> did you mean 'train.warmup_steps'
train.gradient_accumulation_steps=1 -> did you mean 'train.micro_batch' (the most sequences of a rank at once
train.optim=1 -> did you mean 'train.optimizer' (in lower case)?
train.checkpoint.save_total_limit=1 -> did you mean 'train.checkpoint.keep'?
train.xyzzy=1 -> known here: steps, sequence_length
train.tp=1 -> did you mean 'parallel.tp'?
train.save_every=1 -> did you mean 'train.checkpoint.every_steps'?
train.sample_every=0 -> 'train.sample_every' is 0 (int): input should be greater than 0; null switches it off.
train.log_every=0 -> input should be greater than 0.
launch.nodes=1 -> did you mean 'launch.train.nodes'?
learning_rate=1 -> did you mean 'train.lr'?
lr=1 -> did you mean 'train.lr'?
model.hidden_size=1 -> did you mean 'model.dim'?
model.n-layers=1 -> did you mean 'model.layers'?
output_dir=1 -> did you mean 'runs_dir'?
model.presets=llama3_8b -> did you mean 'model.preset'
model.rope_scaling={factr: 4} -> unknown key 'model.rope_scaling.factr'; did you mean 'model.rope_scaling.factor'
model.rope_scaling={kind: linear, factor: 4} -> unknown key 'model.rope_scaling.kind'

parallel.tp=4 -> model.kv_heads 2 is not divisible by parallel.tp 4
parallel.tp=2; model.vocab_size=513 -> model or tokenizer, 513, is
parallel.tp=2; model.context_length=257 -> model.context_length 257 is not
parallel.tp=2; train.sequence_length=127; train.batch_tokens=1016 -> train.sequence_length 127 is not
parallel.dp_shard=0 -> 'parallel.dp_shard' is 0 (int): input should be greater than 0
parallel.dp_replicate=0 -> 'parallel.dp_replicate' is 0 (int): input should be -1
parallel.dp_replicate=-1 -> parallel.dp_replicate and parallel.dp_shard are both -1
parallel.offload=optimizer -> parallel.offload 'optimizer' is for parallel.engine 'deepspeed'
parallel.engine=deepspeed; parallel.tp=2; parallel.reduce=last -> parallel.tp 2, parallel.reduce 'last': for
parallel.engine=deepspeed; parallel.offload=params -> needs stage 3, not parallel.zero_stage 2
parallel.engine=deepspeed; parallel.reshard=never -> parallel.reshard 'never': for parallel.engine 'fsdp2'
parallel.engine=deepspeed; parallel.pp=2 -> parallel.pp 2: for parallel.engine 'fsdp2', not 'deepspeed'
parallel.engine=deepspeed; train.precision=fp64 -> 'fp64' needs parallel.engine 'fsdp2'
parallel.engine=deepspeed; train.precision=fp8 -> 'fp8' needs parallel.engine 'fsdp2'
parallel.engine=deepspeed; parallel.zero_stage=3; train.compile=true -> train.compile true does not work
train.precision=fp8; train.sequence_length=200; train.batch_tokens=1600 -> 200 is not a multiple of 16
parallel.cp=2; train.precision=fp8; train.sequence_length=176; train.batch_tokens=1408 -> 176 is not a multiple of 16 \
x parallel.cp 2, which train.precision 'fp8'
parallel.cp=3 -> is not divisible by 3 (parallel.cp 3 x parallel.tp 1)
parallel.pp=5 -> 5 pipeline stages (parallel.pp 5, parallel.pp_schedule '1f1b') are more than model.layers 4
parallel.pp=2; parallel.pp_schedule=interleaved; parallel.pp_stages=3 -> 6 pipeline stages
parallel.timeout_minutes=30 -> timeout_minutes 30.0 is not longer than 3 x train.guards.hang_minutes 10.0
train.activation_checkpointing=selective; train.kept_activations=[] -> is [] (list): list should have at least 1 item
train.attention=flash -> train.attention 'flash' is not known. Take auto, sdpa, by_document
convert.average=[4, 2] -> [4, 2]: name each step once, in order, and none above train.steps 1000.
convert.average=[2, 2000] -> [2, 2000]: name each step once, in order, and none above train.steps 1000.

train.optimizer=sgd -> train.optimizer 'sgd' is not known. Take adamw, muon, or write my_module:NAME for
train.optimizer=nowhere.lion:LION -> LION, which cannot be imported (ModuleNotFoundError: No module
train.optimizer=tests.training.outside:LION -> (AttributeError: module 'tests.training.outside' has no attribute 'LION')
train.optimizer=tests.training.outside:sgd -> write MINE = OptimizerKind('tests.training.outside:sgd'), and train.optim
train.mup_base_width=64; train.optimizer=tests.training.outside:SGD -> train.mup_base_width works with adamw and muon
train.optimizer=muon; parallel.engine=deepspeed -> train.optimizer 'muon' works under parallel.engine fsdp2, not \
'deepspeed', which flattens the weights. Take parallel.engine=fsdp2, or train.optimizer=adamw.
train.optimizer=tests.training.outside:SGD; parallel.engine=deepspeed -> not 'deepspeed', which flattens
train.optimizer=muon; train.optimizer_settings.beta=0.9 -> train.optimizer 'muon': unknown key \
'train.optimizer_settings.beta'; known here: momentum, nesterov, iterations.
train.optimizer_settings.momentum=0.9 -> train.optimizer 'adamw': unknown key 'train.optimizer_settings.momentum'; \
known here: none.
train.optimizer=muon; train.optimizer_settings.iterations=2.5 -> 'train.optimizer_settings.iterations' is 2.5 (float)
train.optimizer=muon; train.optimizer_settings.momentum=true -> 'train.optimizer_settings.momentum' is True (bool)
train.param_groups={output.*: {lr: -1}} -> 'train.param_groups.output.*.lr' is -1
train.param_groups={output.*: {lr_factor: 2}} -> unknown key 'train.param_groups.output.*.lr_factor'

train.log_to=[wandbb] -> 'train.log_to.0': there is no log sink of the kind 'wandbb'; did you mean 'wandb'?
train.log_to=[tensorboard, {kind: wandb, projekt: x}] -> unknown key 'train.log_to.1.projekt'; did you mean \
'train.log_to.1.project'?
shard.filters=[length, length] -> 2 filters named 'length'; there can be one. Give one a `name` of its own.
train.log_to=[mlflow, {kind: mlflow}] -> train.log_to has 2 sinks of kind 'mlflow'
train.log_to=tensorboard -> 'train.log_to' is 'tensorboard' (str)

runs_dir=s3://bucket/runs -> 'runs_dir': s3://bucket/runs is an address, but a path on this machine is needed, mounted \
file systems included. Mount it, or
reuse=gs://bucket/runs/demo -> 'reuse': gs://bucket/runs/demo is an address
tokenizer={kind: sentencepiece, character_coverage: 0.9} -> 0.9 (float): input should be greater than or equal to 0.98
tokenizer.path=s3://b/t.model -> copy it here first
tokenizer.path=https://x.org/t.model -> 'tokenizer.path': https://x.org/t.model is an address
tokenizer.path=file:///data/t.model -> without file://
shard.sources=[{kind: files, name: a, paths: ['hf://datasets/owner/set/a.parquet']}] -> sources of the kind hf
shard.sources=[{kind: files, name: a, paths: ['ftp://x/a.txt']}] -> Sources are also read from s3://, gs://
shard.sources=[{kind: files, name: a, paths: ['memory://x/a.txt']}] -> Sources are also read from s3://, gs://
shard.sources=[{kind: files, name: a, paths: ['s3:///a.txt']}] -> names no bucket
shard.sources=[{kind: files, name: a/b, paths: [a]}] -> 'shard.sources.0.name': 'a/b' must be letters, digits, - and _
shard.sources=[{kind: stdlib, name: ééééééééééééééééééééééééééééééééééééééééééééééééééééééééééééé}] -> at most 60
shard.sources=[{kind: files, name: a, paths: ['s3://key:secret@b/a']}] -> .paths.0': a URL has a name or password
shard.sources=[{kind: hf, name: a, dataset: 's3://b/c'}] -> 'shard.sources.0.dataset': s3://b/c is an address
shard.filters=[{kind: language, path: 's3://b/lid.bin', languages: [en]}] -> .path': s3://b/lid.bin is an addr
shard.filters=[{kind: decontamination, files: [{path: 's3://b/a.jsonl', fields: [q]}]}] -> s3://b/a.jsonl is an address
evaluate.task_folders=['s3://b/tasks'] -> 'evaluate.task_folders.0': s3://b/tasks

convert.copy_to=runs/copies -> begins with s3://
encode.copy_to=https://host/bucket -> begins with s3://
train.tokens_from=s3:// -> 'train.tokens_from': s3:// names no bucket
convert.copy_to=file://host/folder -> another machine
train.checkpoint.copy_to=s3://key:word@bucket/a -> 'train.checkpoint.copy_to': a URL has a name or password
encode.copy_to=s3://bucket/a?X-Amz-Signature=1 -> 'encode.copy_to': a URL with a question mark is signed
train.checkpoint.copy_to=s3://b/a; convert.copy_to=s3://b/a/ -> need separate places
train.checkpoint.copy_to=s3://b/a/; convert.copy_to=s3://b/a/x -> convert.copy_to s3://b/a/x lies in \
train.checkpoint.copy_to s3://b/a
convert.copy_to=s3://b/a; encode.copy_to=s3://b/a/x -> encode.copy_to s3://b/a/x lies in convert.copy_to s3://b/a
"""


@pytest.mark.parametrize(("overrides", "words"), table(REFUSED))
def test_what_cannot_be_is_refused_in_words(written, overrides, words):
    assert words in refusal(written(BASE), *overrides.split("; "))


@pytest.mark.parametrize("overrides", [
    *(f"train.attention={name}" for name in ("auto", *BACKENDS, "my_package.my_module:MyBackend")),
    "parallel.timeout_minutes=1; train.guards.hang_minutes=null",
    "parallel.tp=2; model.vocab_size=514", "parallel.engine=deepspeed",
    "train.param_groups={output.*: {lr: 0.5, weight_decay: 0}}",
    "train.optimizer=muon; train.optimizer_settings={momentum: 0, nesterov: false}",
    "train.optimizer=tests.training.outside:SGD; train.optimizer_settings={momentum: 0.5}",
    "runs_dir=/a/b:c/d; reuse=../s3/x", "train.checkpoint.copy_to=s3://b/a; convert.copy_to=s3://b/ab",
    "train.checkpoint.copy_to=abfss://box@account/a; convert.copy_to=gs://b/a"])
def test_what_can_be_is_not(written, overrides):
    load_config(written(BASE), overrides.split("; "))


@pytest.mark.parametrize(("overrides", "ranks", "words"), table("""
dp_replicate=-1 dp_shard=4 tp=2 -> 12 -> parallel: dp_replicate -1 x dp_shard 4 x tp 2 needs a multiple of 8 \
ranks, but there are 12.
tp=2 -> 3 -> parallel: dp_shard -1 x tp 2 needs a multiple of 2 ranks, but there are 3.
dp_replicate=2 dp_shard=2 tp=2 -> 4 -> dp_replicate 2 x dp_shard 2 x tp 2 needs 8 ranks, but there are 4.
tp=1 -> 3 -> 8 sequences
pp=2 cp=2 -> 6 -> parallel: pp 2 x dp_shard -1 x cp 2 needs a multiple of 4 ranks, but there are 6.
pp=2 -> 16 -> at least parallel.pp (2) micro-batches in a step, and with parallel.pp_schedule interleaved a multiple \
of it; each of 8 data-parallel groups has 1 of 8 sequences (train.batch_tokens 2048
pp=2 pp_schedule=interleaved -> 16 -> interleaved a multiple of it; each of 8
tp=1 -> 128 -> the global batch of 8 sequences (train.batch_tokens 2048 / train.sequence_length 256) is not divisible \
by 128 data-parallel ranks, even one sequence at a time. Take fewer nodes, a multiple of 32768 as train.batch_tokens, \
or larger parallel.tp, parallel.cp or parallel.pp, whose ranks share sequences.
""", str, int))
def test_ranks_that_cannot_be_laid_out(written, overrides, ranks, words):
    given = ["train.sequence_length=256", "train.batch_tokens=2048", *(f"parallel.{one}" for one in overrides.split())]
    [message] = rank_problems(load_config(written(BASE), given), ranks)
    assert words in message

