"""The contract of all stages. The author of a stage needs this page and nothing else of this package.

A stage is one module. It registers a `Stage` (stages.py: what it needs, which settings decide its outputs), gives a
function that does the work of one attempt to `stage_main` (entry.py), and is started by `python -m`:

    import sys
    from pathlib import Path

    from drover.plugins import Stage, Task, output_record, register_stage, stage_main, write_json

    register_stage(Stage("words", needs=("shard",), reads=("stages.words",), code=(), own_module="words"))

    def count(folder, payload):          # runs in a worker process; the payload decides its outputs
        path = folder / f"{payload['name']}.json"
        write_json(path, {"words": len(Path(payload["text"]).read_bytes().split())})
        return {"outputs": [output_record(folder, path)]}

    def words(work):                     # a `Work` (stage_work.py)
        shards, manifest = work.input("shard")
        tasks = []
        for record in manifest.outputs:
            name = record["path"].replace("/", "-")
            tasks.append(Task(name, {"name": name, "sha256": record["sha256"], "text": str(shards / record["path"])}))
        records = work.run_pass("count", tasks, count)
        work.commit([output for record in records for output in record["outputs"]], {"files": len(records)})

    if __name__ == "__main__":
        sys.exit(stage_main("words", words))

The contract does everything else. It refuses the stage if its settings or inputs have changed. It does each task once,
whatever is killed. It writes the manifest last, and this commits the stage. The function must only

- write below `work.folder`, each file complete or not at all (`write_json`, `atomic_file`),
- make the same outputs from the same settings and inputs,
- raise UserError for what a user can fix, and report progress with `work.say`.

A stage without tasks writes its outputs itself, and commits. docs/extending.md has one, with its configuration.

    entry.py          one attempt from the command line to the exit status, and what is allowed
    stages.py         the table of stages
    run.py            the run folder, and the state of each stage in it
    stage_work.py     Work: inputs, tasks, commit
    workers.py        tasks, the processes that do them, requests to stop; the ledger of tasks is in core/files.py
    locks.py          who may work on a stage, and who does which task
    manifest.py       the record of a finished stage, that of a started one, and whether its outputs are valid
    state.py          the status of an attempt, its progress, and the launcher's job that it belongs to
    inputs.py         files from outside of the run, their hashes, and hashing in the background
    broadcast.py      what rank 0 sends to the other ranks; signed.py: proof that rank 0 sent it
"""
