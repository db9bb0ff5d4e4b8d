"""The export of a mean: training keeps the checkpoints that it is of, over a kill, and nothing else goes in."""

import torch

from pipeline.contract.manifest import read_manifest
from pipeline.formats.sharded_tensors import CheckpointReader
from pipeline.formats.weights import HuggingFaceWeights
from tests.conftest import run_stage
from tests.stages.test_damaged_inputs import flipped
from tests.stages.training import run_with_faults, train_folder

AVERAGE = ["convert.average=[5, 8, 12]", "train.checkpoint.keep=1"]


def test_the_mean_of_named_checkpoints_is_exported_to_the_bit(fresh):
    """What is not there or damaged is refused by name."""
    run_with_faults(fresh, "kill:rank=0,step=10", *AVERAGE, expect=-9)
    run_stage("train", fresh, *AVERAGE)
    saved = sorted((train_folder(fresh) / "checkpoints").iterdir())
    assert [path.name for path in saved] == ["step-00000005", "step-00000008", "step-00000012"]
    said = run_stage("convert", fresh, "convert.average=[4, 12]", expect=2).stderr
    assert "convert.average names step 4, of which there is no whole checkpoint" in said
    assert "(there are those of 5, 8, 12)" in said
    with flipped(saved[0] / "rank-00000.safetensors") as part:
        assert f"{part} is not what training saved" in run_stage("convert", fresh, *AVERAGE, expect=2).stderr
    said = run_stage("convert", fresh, *AVERAGE).stdout
    assert "the mean of step-00000005, step-00000008, step-00000012: " in said
    out = train_folder(fresh).parent / "convert"
    assert read_manifest(out).counts["averaged"] == [path.name for path in saved]
    with HuggingFaceWeights(out / "hf") as exported:
        assert len(exported.shapes) > 10
        for name, shape in exported.shapes.items():
            parts = []
            for path in saved:
                with CheckpointReader(path) as reader:
                    parts.append(reader.read(f"model.{name}").double())
            assert not torch.equal(parts[0], parts[2])
            mean = ((parts[0] + parts[1] + parts[2]) / 3).float()
            assert torch.equal(exported.read(name, (0,) * len(shape), shape), mean), name
