"""The end of each source's text as the validation split (`shard.validation_rule: tail`): exact to the character.

Which documents and parts of documents make the splits, test_passes.py compares for any corpus.
"""

from tests.stages.test_shard import documents, files_source, run, write_config


def test_one_text_is_cut_where_nanogpt_cuts_it(tmp_path, capsys):
    text = ("abc \n\r\tüß\u2581漢😀" * 1000)[:12_347]
    cut = int(len(text) * 0.9)
    (tmp_path / "f.txt").write_text(text, newline="")
    config = write_config(tmp_path, [files_source("s", tmp_path / "f.txt")], validation_share=0.1)
    assert run(config) == 2
    assert "shard.validation_rule: tail" in capsys.readouterr().err
    (tmp_path / "one.txt").write_text("x")
    assert run(config, "shard.validation_rule=tail", f"shard.sources.0.paths=[{tmp_path}/one.txt]", "name=b") == 2
    assert "all of the 1 documents are in the validation split" in capsys.readouterr().err
    assert run(config, "shard.validation_rule=tail") == 0
    assert "1 documents in + 1 by cutting in two = 1 train + 1 validation" in capsys.readouterr().out
    [train], [validation] = documents(config, "train"), documents(config, "validation")
    assert (train.id, train.text) == (f"f.txt[:{cut}]", text[:cut])
    assert (validation.id, validation.text) == (f"f.txt[{cut}:]", text[cut:])
