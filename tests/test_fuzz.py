"""What somebody else may have made, damaged in many ways: each reader gives a result or one sentence. Nothing else is
raised, written or started, nothing hangs, and nothing takes gigabytes."""

import json
import os
import shutil
import tarfile
from functools import cache, partial

import numpy as np
import pytest

from drover.launch.commands import cancel, logs, stop
from drover.launch.slurm.chain import read_chain
from drover.launch.slurm.nodes import failures
from drover.launch.status import main as status
from drover.pipeline.config.loading import load_config, shape_in
from drover.pipeline.contract.manifest import STARTED, read_manifest, read_start, start_or_empty
from drover.pipeline.contract.run import run_in
from drover.pipeline.contract.stages import STAGES
from drover.pipeline.contract.state import read_state
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import append_line, write_json, write_sealed, write_text
from drover.pipeline.data.filters.decontamination import EvaluationSet, items_of
from drover.pipeline.data.text_shards import read_shard, read_texts, shard_records
from drover.pipeline.data.token_shards import ShardTable, read_batch, size_problems
from drover.pipeline.evaluation.tasks import find_tasks
from drover.pipeline.formats.weights import open_weights
from drover.pipeline.records.checkpoints import complete_checkpoints, read_marker
from drover.pipeline.records.goodput import first_start, goodput
from drover.pipeline.records.hangs import judge_hang, write_places
from drover.pipeline.records.metrics import Rollback, RunFacts, add_rollback, read_metrics
from drover.pipeline.records.weight_files import read_settings
from drover.pipeline.tokenization.conversion import open_tokenizer, write_hugging_face
from drover.pipeline.tokenization.files import names_code, settings_text, vocabulary_record, write_record
from drover.pipeline.tokenization.tokenizer import load_tokenizer
from drover.tools.audit import main as audit
from drover.tools.trace.__main__ import main as trace
from drover.tools.verify import main as verify
from tests.conftest import REPOSITORY
from tests.evaluation.test_tasks import write_planted
from tests.launch.run_folders import HandMade, ago
from tests.mutations import FORBIDDEN, Reader, planted, put, tried
from tests.records.recorded_time import Recorded
from tests.stages.small_run import make_trained_run
from tests.tiny_models import TOKENIZER_OF_BYTES, for_tokenizer, write_huggingface, write_run
from tests.token_shards import shards_in
from tests.tokenization.conftest import byte_level, chunks, texts  # noqa: F401 - fixtures
from tests.tokenization.conftest import files as vocabularies  # noqa: F401 - a fixture

TEXT = "def größer(x):\n    return x\0 <s> 漢字 </s>\n"
RUN = "runs/small"


def _each(*reads):
    """Let all of them read, also after one that refuses."""
    for read in reads:
        try:
            read()
        except UserError as error:
            assert str(error)


def _config(folder):
    text = (REPOSITORY / "configs/demo.yaml").read_text()
    (folder / "base.yaml").write_text(text)
    (folder / "c.yaml").write_text("""
base: base.yaml
name: a
shard: {sources: [{kind: files, name: t, paths: [t.txt]}], filters: [{kind: length, min_words: 2}]}
model: &model {dim: 96, context_length: 512, rope_scaling: {factor: 8, original_context_length: 256}}
train: {phases: [{until: 819200, mixture: {t: 1}}, {until: 1474560, lr: 0.1}]}
launch: {train: {nodes: 2}, setup: [module load x]}
""")


def _looked_at(folder):
    """A run of all stages up to train, with what its launcher and its training write."""
    make_trained_run(folder)
    recorded = Recorded(folder / RUN).play("start 5; steps 3; save 1; end finish")
    recorded.launcher("attempt", ranks=1, nodes=["n"])
    write_text(folder / RUN / "logs/train/1.0/output.log", "a line\n")


def _look_at(folder):
    """What programs that somebody else's run is looked at with do."""
    run = str(folder / RUN)
    for program in ([verify, "--run", run], [audit, "--run", run], [status, "--run", run],
                    [trace, "--run", run, "--step", "1"], [logs, run, "train"],
                    [stop, run], [cancel, run]):
        assert program[0](program[1:]) in (0, 1, 2)


def _job(folder):
    run = HandMade(folder / "run")
    run.submitted(*run.whole_chain())
    run.done("shard", outputs=[{"path": "train/a.tar", "bytes": 1, "sha256": "0", "split": "train", "source": "a",
                                "docs": 1}], counts={"documents": 3})
    run.state("encode", "running", job="13", units=3)
    run.state("tokenizer", "failed", job="12", reason="no room")
    run.progress("encode", 3, 7, "shards")
    run.progress("train", 12, 500, "steps", goodput=0.5)
    run.state("train", "preempted", job="15", step=12)
    run.attempt("job", "train", "15")
    run.attempt("attempt", "train", "15")
    run.attempt("ended", "train", "15", status="hung", reason="node", next="restart")
    append_line(run.folder / "launch/nodes.jsonl", {"node": "n1", "at": ago(60), "job": "15.0.0", "reason": "lost"})
    return run


def _records(folder):
    """What training, its launcher and a hang leave."""
    Recorded(folder).play("""launcher job; launcher preflight seconds=3; start 5; steps 3; look 2;
        roll_back 2 lost_s=1; hang 9; launcher ended next=stop status=hung reason=x; start 5 step=2;
        event plan_changed number=1 step=4; steps 2 plan_changes=1; save 1; end finish stall_s=1""")
    add_rollback(folder / "train", Rollback(3, 2, ((4, 8),), "ab", "a spike"))
    write_places(folder / "train", ["n0", "n1"])


def _read_records(folder):
    train = folder / "train"
    _each(lambda: read_metrics(train / "metrics.jsonl"), lambda: RunFacts(folder).plan_changes,
          lambda: goodput(RunFacts(folder)), lambda: first_start(RunFacts(folder)), lambda: RunFacts(folder).rollbacks,
          lambda: judge_hang(train / "hangs/local.0.0", 2))


def _states(folder):
    write_sealed(folder / "STATE.json", {"status": "running", "step": 3, "units": 1, "job": "15", "at": ago(3)})
    write_json(folder / STARTED, {"fingerprint": {"config": {"a": 1}, "inputs": {}, "files": {}}, "chain": "c1",
                                  "force_id": "x", "files": [], "accepted": []})


def _read_states(folder):
    state = read_state(folder)
    assert state is None or state.status in ("running", "done", "preempted", "failed")
    start_or_empty(folder)
    read_start(folder)


def _read_run(folder):
    """As stages and the launcher look at a run: what stands where, what it is made of."""
    run = run_in(folder / RUN)
    for stage in STAGES:
        str(run.state(stage))
        run.record(stage)
        run.changed(stage)


def _read_token_shards(folder):
    encode = folder / RUN / "encode"
    _each(*(partial(read_batch, path) for path in encode.glob("*/*.arrow")))
    manifest = read_manifest(encode)
    if manifest is None:
        return
    table = ShardTable.of(manifest.outputs)
    if size_problems(encode, table, range(len(table))):
        return
    for split in ("train", "validation"):
        for shard in shards_in(encode, table, split):
            shard.read_offsets()
            shard.tokens(0, shard.token_count), shard.text_bytes(0, shard.documents), shard.keys(0, shard.documents)
            if shard.documents:
                shard.document_tokens(shard.documents - 1), shard.document_starts(0, shard.token_count)


def _header(size):
    """The beginning of a tar whose first member is said to be so long."""
    member = tarfile.TarInfo("0.json")
    member.size = size
    return member.tobuf(tarfile.GNU_FORMAT) + b"{}"


def _read_text_shards(folder):
    shards = folder / RUN / "shard"
    manifest = read_manifest(shards)
    for record in shard_records(manifest, "train") if manifest else ():
        _each(lambda record=record: [document.text for document in read_shard(shards, record)],
              lambda record=record: [batch.texts for batch in read_texts(shards, record, 1000)])


def _read_weights(folder):
    with open_weights(folder) as weights:
        for name in weights.shapes:
            weights.read(name)


def _checkpoint(folder):
    write_run(folder / "run", {3: for_tokenizer(TOKENIZER_OF_BYTES, dim=12, ffn_dim=8, layers=1)}, TOKENIZER_OF_BYTES)


def _read_checkpoint(folder):
    for checkpoint in complete_checkpoints(folder / "run/train"):
        read_marker(checkpoint)
        shape_in(checkpoint)
    _read_weights(folder / "run")


def _hugging_face(folder):
    model = for_tokenizer(TOKENIZER_OF_BYTES, dim=12, ffn_dim=8, layers=1)
    write_huggingface(folder / "hf", model, TOKENIZER_OF_BYTES)


def _read_hugging_face(folder):
    shape_in(folder / "hf")
    read_settings(folder / "hf/generation_config.json")
    _read_weights(folder / "hf")


def _vocabulary(path, folder):
    """A whole vocabulary, of the kind that its folder is named by."""
    shutil.copy(path, folder)
    kind = path.parent.name
    tokenizer = open_tokenizer({"bpe": "sentencepiece", "unigram": "sentencepiece"}.get(kind, kind), folder / path.name)
    write_hugging_face(tokenizer, folder / "hf")
    write_record(folder, tokenizer)
    if kind == "huggingface":
        write_json(folder / "tokenizer_config.json", {"bos_token": {"content": "<s>"}, "eos_token": "</s>",
                                                      "model_max_length": 9, "auto_map": {"AutoTokenizer": "x.Y"}})


def _read_vocabulary(kind, file):
    def read(folder):
        beside = folder / "tokenizer_config.json"
        if kind == "huggingface" and beside.exists() and not names_code(beside):
            settings_text(beside, 5)
        tokenizer = open_tokenizer(kind, folder / file)
        tokenizer.decode(tokenizer.encode(TEXT))
        [tokenizer.token_bytes(token) for token in range(min(tokenizer.used, 300))]
    return read


def _read_finished_vocabulary(folder):
    vocabulary_record(folder)
    load_tokenizer(folder).encode("x")


def _items(folder):
    items = [{"question": f"what is {number}?", "answer": {"text": ["a", "b"]}} for number in range(3)]
    (folder / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    (folder / "items.json").write_text(json.dumps(items))
    (folder / "items.csv").write_text('question,answer\n"what?",that\n"where,\nthen?",there\n')
    import pyarrow as pa
    import pyarrow.parquet as pq
    table = pa.Table.from_pylist(items)
    pq.write_table(table, folder / "items.parquet")
    with pa.ipc.new_file(folder / "items.arrow", table.schema) as writer:
        writer.write_table(table)
    import gzip

    import zstandard
    (folder / "i.jsonl.gz").write_bytes(gzip.compress((folder / "items.jsonl").read_bytes()))
    (folder / "i.jsonl.zst").write_bytes(zstandard.compress((folder / "items.jsonl").read_bytes()))


def _offsets_beyond(whole):
    """The items in Arrow's form, with lists that are said to go on beyond what they hold."""
    there, beyond = (np.array([0, 2, 4, last], np.int32).tobytes() for last in (6, 1 << 30))
    assert there in whole
    return whole.replace(there, beyond)


def _read_items(folder):
    def read(path):
        fields = ["question"] if path.suffix == ".csv" else ["question", "answer.text"]
        sum(len(item.text) for item in items_of(EvaluationSet(path=str(path), fields=fields)))

    _each(*(partial(read, path) for path in sorted(folder.iterdir())))


def _read_tasks(folder):
    _each(*(task.inputs for task in find_tasks([folder], folder).values()),
          *(lambda path=path: list(items_of(EvaluationSet(path=str(path)))) for path in sorted(folder.glob("*.yaml"))))


def _show_status(folder):
    os.environ["PATH"] = ""  # no Slurm to be asked
    assert status(["--run", str(folder / "run")]) in (0, 2)


def _read_job(folder):
    run = folder / "run"
    _each(lambda: read_chain(run), lambda: failures(run))


MANIFEST, SHARDS = f"{RUN}/encode/manifest.json", f"{RUN}/shard/manifest.json"
TAR = f"{RUN}/shard/train/code-00000.tar"
READERS = (
    Reader("configuration", _config, lambda folder: load_config(folder / "c.yaml"), cost=12, known=(
        ("c.yaml", lambda whole: b'base: "x\\0y"\n'), ("c.yaml", lambda whole: whole + b"seed: " + b"9" * 5000))),
    Reader("run", make_trained_run, _read_run, (f"{RUN}/*/*.json", f"{RUN}/config.yaml"), cost=20,
           allowed=("open", "os.mkdir", "os.rename"), known=planted("""
        runs/small/encode/manifest.json -> fingerprint -> {}
        runs/small/encode/manifest.json -> accepted -> [3]
        runs/small/encode/manifest.json -> files -> [{}]
        runs/small/shard/manifest.json -> start accepted -> {}""")),  # what was hashed is noted in a run's folder
    Reader("token shards", make_trained_run, _read_token_shards, (f"{RUN}/encode/*/*.arrow", MANIFEST), known=[
        (MANIFEST, lambda whole: b"[" * 100_000), *planted("""
        runs/small/encode/manifest.json -> outputs 0 docs -> 1152921504606846976
        runs/small/encode/manifest.json -> outputs 0 data_offset -> -8
        runs/small/encode/manifest.json -> outputs 0 dtype -> "O"
        runs/small/encode/manifest.json -> outputs 0 path -> "x\\u0000"
        runs/small/encode/manifest.json -> new -> 1""")]),
    Reader("text shards", make_trained_run, _read_text_shards, (f"{RUN}/shard/train/*.tar", SHARDS), any_size=True,
           known=[
        (TAR, lambda whole: _header(8**11 - 1)), (TAR, lambda whole: _header(-5)),
        (TAR, lambda whole: _header(1 << 60)), *planted("""
        runs/small/shard/manifest.json -> outputs 0 source -> null
        runs/small/shard/manifest.json -> outputs 0 path -> "../../x" """)]),
    Reader("states", _states, _read_states, ("**/*.json",), known=planted("""
        STATE.json -> status -> []
        started.json -> files -> 7""")),
    Reader("records", _records, _read_records, ("**/*.json*",), known=(
        ("train/metrics.jsonl", lambda whole: b'{"step": 1, "samples": [1]}\n' + whole),
        ("train/events.jsonl", lambda whole: b'{"event": "start", "time": "x", "startup_s": 1}\n' + whole),
        ("train/rollbacks.json", lambda whole: b"{}"), ("train/places.json", put("nodes", value=[[]])),
        ("train/hangs/*/node0.jsonl", lambda whole: whole.replace(b'["/x', b'[null, "/x')))),
    Reader("job", _job, _read_job, ("run/launch/*.json*",), known=planted("""
        run/launch/chain.json -> jobs 0 elements -> 3""")),
    Reader("looked at", _looked_at, _look_at, (f"{RUN}/[!l]*/**/*", f"{RUN}/config.yaml", f"{RUN}/launch/**/*"),
           cost=30, allowed=(*FORBIDDEN, "open"), known=[
        (f"{RUN}/{name}", how) for how in ("pipe", "endless", "hole", "folder") for name in (
            "config.yaml", "encode/manifest.json", "train/metrics.jsonl", "train/events.jsonl",
            "train/checkpoints/*/COMPLETE.json", "train/checkpoints/*/index.json", "tokenizer/vocabulary.json",
            "encode/train/code-00000.arrow", "shard/train/code-00000.tar", "launch/attempts/1.jsonl",
            "logs/train/1.0/output.log") if (how, name[:4]) != ("hole", "logs")]),
    Reader("status", _job, _show_status, ("run/config.yaml", "run/**/*.json*"), cost=30,
           allowed=("subprocess.Popen", "os.posix_spawn", "os.fork")),  # squeue, which is not there
    Reader("checkpoint", _checkpoint, _read_checkpoint, ("run/train/checkpoints/*/*",), cost=3, known=planted("""
        run/train/checkpoints/*/index.json -> tensors model.norm.weight shape -> [1152921504606846976]
        run/train/checkpoints/*/index.json -> tensors model.norm.weight dtype -> "F3"
        run/train/checkpoints/*/index.json -> tensors model.norm.weight runs -> [{"file": 0, "offset": [0], \
        "size": [12], "steps": [[1152921504606846976, 1, [1]]]}]
        run/train/checkpoints/*/COMPLETE.json -> config -> {}""")),
    Reader("Hugging Face", _hugging_face, _read_hugging_face,
           ("hf/*.safetensors", "hf/*config.json", "hf/*index.json"), cost=2, known=[
        ("hf/config.json", lambda whole: b"[]"), *planted("""
        hf/config.json -> num_hidden_layers -> 1099511627776
        hf/config.json -> vocab_size -> 1152921504606846976
        hf/*index.json -> weight_map -> {"x": "\\u0000"}""")]),
    Reader("tokenizer.json", "huggingface", _read_vocabulary("huggingface", "tokenizer.json"),
           ("tokenizer*.json",), cost=2, known=(
        ("tokenizer.json", put("model", "continuing_subword_prefix", value=".")),
        ("tokenizer.json", lambda whole: b"[]"), ("tokenizer_config.json", lambda whole: b"[" * 100_000))),
    Reader("sentencepiece bpe", "bpe", _read_vocabulary("sentencepiece", "tokenizer.model"), ("*.model",),
           cost=3),
    Reader("sentencepiece unigram", "unigram", _read_vocabulary("sentencepiece", "tokenizer.model"),
           ("*.model",), cost=3, known=(
        ("tokenizer.model", lambda whole: whole.replace("▁".encode(), b"\xff\xfe\xfd")),)),
    Reader("tiktoken", "tiktoken", _read_vocabulary("tiktoken", "tokenizer.model"), ("*.model",)),
    Reader("characters", "char", _read_vocabulary("char", "characters.json"), ("characters.json",), known=planted("""
        characters.json -> characters -> ["a"]
        characters.json -> characters -> "aa" """)),
    Reader("vocabulary", "char", _read_finished_vocabulary, known=[
        ("vocabulary.json", put("file", value="x" * 5000)), *planted("""
        vocabulary.json -> file -> null
        vocabulary.json -> bos_id -> 1099511627776""")]),
    Reader("items", _items, _read_items, cost=2, any_size=True, known=(("items.arrow", _offsets_beyond),)),
    Reader("tasks", write_planted, _read_tasks, cost=3, any_size=True, known=(
        ("planted.yaml", lambda whole: b"task: x\ndataset_kwargs: x\n"),
        ("planted.yaml", lambda whole: b"task: x\ndataset_kwargs: {data_files: /}\n"),
        ("planted.yaml", lambda whole: b"[" * 5000))),
)
CASES = 40


@pytest.fixture(scope="module")
def whole(tmp_path_factory, request):
    """The folder that a function, or a kind of vocabulary, has filled with whole files, once for all that read them."""
    @cache
    def made(make):
        folder = tmp_path_factory.mktemp("whole")
        if isinstance(make, str):
            _vocabulary(request.getfixturevalue("vocabularies")[make], folder)
        else:
            make(folder)
        return folder
    return made


@pytest.mark.parametrize(("seed", "cases"), [
    (0, CASES), pytest.param(1, 4 * CASES, marks=pytest.mark.slow),
    pytest.param(int(os.environ.get("FUZZ_SEED", 2)), 200 * CASES, marks=pytest.mark.soak)])
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_a_right_result_or_one_sentence(reader, seed, cases, whole):
    folder, cases = whole(reader.make), len(reader.known) + max(4, cases // reader.cost)
    found = tried(reader, folder, seed, range(cases))
    assert not found, f"{len(found)} findings:\n" + "\n\n".join(found[:5])
