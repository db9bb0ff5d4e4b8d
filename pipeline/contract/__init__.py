"""What every stage keeps to. Whoever writes a stage needs this page, and nothing else of this room.

A stage is one module. It registers a `Stage` (stages.py: what it needs, which settings decide its outputs), gives a
function that does the work of one attempt to `stage_main` (entry.py), and is started by `python -m`:

    register_stage(Stage("words", needs=("shard",), reads=("stages.words",), code=(), own_module="words"))

    def count(folder, payload):          # in a worker process; all that decides its outputs is in the payload
        path = folder / f"{payload['name']}.json"
        write_json(path, {"words": len(Path(payload["text"]).read_bytes().split())})
        return {"outputs": [output_record(folder, path)]}

    def words(work):                     # a `Work` (stage_work.py)
        shards, manifest = work.input("shard")
        units = []
        for record in manifest.outputs:
            name = record["path"].replace("/", "-")
            units.append(Unit(name, {"name": name, "sha256": record["sha256"], "text": str(shards / record["path"])}))
        records = work.do_units("count", units, count)
        work.commit([output for record in records for output in record["outputs"]], {"files": len(records)})

    if __name__ == "__main__":
        sys.exit(stage_main("words", words))

All else is done around it. The stage is refused where what it is made of has changed; each unit is done once, whatever
is killed; the manifest comes last and is the commit. The function must only

- write below `work.folder`, each file whole or not at all (`write_json`, `atomic_file`: pipeline/core/files.py),
- make the same of the same settings and inputs,
- say what a user can mend as UserError, and what goes on by `work.say`.

A stage without units writes its outputs itself, and commits. docs/extending.md has one, with its configuration.

    entry.py          one attempt from the command line to the exit status; preparation.py decides what is allowed
    stages.py         the table of stages
    run.py            the run folder: which outputs may be trusted, and why not
    stage_work.py     Work: inputs, units, commit
    workers.py        the processes that do units; stopping.py: requests to stop them
    tasks.py          units and their keys, shares of several jobs; the ledger of what is done is in core/files.py
    manifest.py       the record of a finished stage; start_record.py: of one that is begun; state.py: its last word
    external_inputs.py  files from outside of the run; content_hash.py: those that units read
    input_check.py    hashes what is read beside the work
    locks.py          who may work on a stage
    telling.py        what rank 0 tells the other ranks; signed.py: that it was rank 0
"""
