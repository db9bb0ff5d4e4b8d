"""Attention and optimizers from outside: their files are recorded as code of training, and absent ones refused."""

from drover.pipeline.config.checks import absent_attention
from drover.pipeline.config.loading import load_config
from drover.pipeline.contract.run import code_hashes
from drover.pipeline.contract.stages import STAGES
from drover.pipeline.records.weight_files import training_code


def loaded(tmp_path, monkeypatch, train):
    for name, text in (("outside_attention", "raise ImportError('imported')"),
                       ("outside_steps", "import nothing_like_it"),
                       ("outside_kind", "from drover.pipeline.config.optimizers import OptimizerKind\n"
                        "LION = OptimizerKind('outside_steps:Lion')\n")):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "c.yaml").write_text(f"train: {{{train}}}\n")
    return load_config(tmp_path / "c.yaml", check=False)


def test_their_files_are_code_of_training_without_being_imported(tmp_path, monkeypatch):
    config = loaded(tmp_path, monkeypatch, "attention: 'outside_attention:Ours', optimizer: 'outside_kind:LION'")
    assert training_code(config) == {name: tmp_path / f"{name}.py"
                                     for name in ("outside_attention", "outside_kind", "outside_steps")}
    before = code_hashes(STAGES["train"], config)
    (tmp_path / "outside_steps.py").write_text("# another")
    after = code_hashes(STAGES["train"], config)
    assert {name for name in after if after[name] != before[name]} == {"outside_steps"}


def test_only_an_attention_that_is_not_there_is_refused(tmp_path, monkeypatch):
    config = loaded(tmp_path, monkeypatch, "attention: sdpa, optimizer: muon")
    assert training_code(config) == {} and list(absent_attention(config)) == []
    assert list(absent_attention(loaded(tmp_path, monkeypatch, "attention: 'outside_attention:Ours'"))) == []
    config = loaded(tmp_path, monkeypatch, "attention: 'no_such_module:Ours'")
    assert "there is no module no_such_module" in next(absent_attention(config))
