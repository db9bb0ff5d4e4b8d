"""A run's records without the run: what training with rollbacks leaves behind, for the tools that read it."""

from drover.pipeline.config.loading import load_config, save_config
from drover.pipeline.config.phases import PhasePlan
from drover.pipeline.contract.run import Run
from drover.pipeline.contract.stage_work import Work
from drover.pipeline.core.files import write_sealed
from drover.pipeline.data.sampling.packing import Alone, make_plan
from drover.pipeline.records.checkpoints import FORMAT, MARKER
from drover.pipeline.records.metrics import Rollback, add_rollback, excluded_by, read_rollbacks
from drover.pipeline.training.data import open_training_data, read_shard_table
from tests.data.source_files import write_jsonl

STEPS, EVERY = 30, 5


class Recorded:
    """The records of a run with rollbacks, as training leaves them, over real token shards; nothing is trained.

    `unsound` steps are skipped, `spikes` (first samples of batches) rolled back, and the run is killed before `kills`.
    `settings` are overrides of the configuration.
    """

    def __init__(self, folder, encoded, unsound=(8,), spikes=(192, 368), kills=(18,), stop_after=STEPS, settings=()):
        self.folder, self.train = folder, folder / "train"
        config = load_config(encoded, [f"runs_dir={folder.parent}", f"reuse={encoded.parent / 'runs/mini'}",
                                       *settings])
        self.phases = PhasePlan.of(config.train)
        self.train.mkdir(parents=True)
        save_config(config, folder / "config.yaml")
        run = Run(config)
        work = Work(run, "train", {})
        table = read_shard_table(work)
        data = open_training_data(work, table, work.input("encode")[0],
                                  lambda packing: make_plan(packing, Alone(), print))
        self.plan = data.order.plan_sha256
        self.lines, self.events, self.checkpoints, self.place = [], ["start"], {0: (0, 0)}, {"ranks": 1}
        self.unsound, self.spikes, self.kills = unsound, list(spikes), list(kills)
        while not self.attempt(stop_after):
            pass
        self.write()

    def attempt(self, stop_after):
        """One start, from the newest checkpoint to the end, a kill or a rollback; whether it got to the end."""
        step = max(self.checkpoints)
        (cursor, skipped), rollbacks = self.checkpoints[step], read_rollbacks(self.train)
        excluded = excluded_by(rollbacks, [self.plan])
        while step < stop_after:
            if self.kills[:1] == [step]:
                self.kills.pop(0)
                self.events.append("resume")
                return False
            taken = excluded.take(cursor, self.phases.phase_of(step + 1).sequences)
            line = {"step": step + 1, "samples": [cursor, taken.end], "loss": 5 - 0.001 * taken.end, "grad_norm": 1.0}
            if left_out := excluded.within(cursor, taken.end):
                line["left_out"] = left_out
            if rollbacks:
                line["rollbacks"] = len(rollbacks)
            if step + 1 in self.unsound:
                line.update(loss="nan", skipped="nonfinite")
            self.lines.append(line)
            if taken.ranges[0][0] in self.spikes:
                add_rollback(self.train, Rollback(step + 1, max(self.checkpoints), taken.ranges, self.plan, "a spike"))
                self.events.append("rollback")
                return False
            step, cursor, skipped = step + 1, taken.end, skipped + (step + 1 in self.unsound)
            if step % EVERY == 0:
                self.checkpoints[step] = (cursor, skipped)
        return True

    def write(self):
        """The files, as they are on the disk of such a run."""
        for name, records in (("metrics", self.lines), ("events", [{"event": event, **self.place}
                                                                   for event in self.events])):
            write_jsonl(self.train / f"{name}.jsonl", records)
        for step, (cursor, skipped) in list(self.checkpoints.items())[1:]:
            write_sealed(self.train / f"checkpoints/step-{step:08d}/{MARKER}", {
                "format": FORMAT, "files": [],
                "progress": {"step": step, "samples": cursor, "guards": {"skipped_total": skipped}}})
