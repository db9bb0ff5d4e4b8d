"""Every stage answers for all that it is made of: settings, stages and outside files, over `reuse` too."""

import pytest

from drover.launch.checks import refuse_unusable_inputs, say_absent
from drover.launch.plan import Options, plan
from drover.pipeline.contract.entry import stage_main
from drover.pipeline.contract.stages import parse_stages
from drover.pipeline.contract.state import write_state
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import write_text
from tests import refusal
from tests.stand_ins import call, copy_corpus, count_bytes, count_bytes_again, in_chain, never, run_of


@pytest.fixture
def made(place):
    """A run whose shard and tokenizer are done, of two sources: `t`, a file by its name, and `g`, a glob."""
    (place / "more").mkdir()
    for name in ("one", "two"):
        (place / f"more/{name}.txt").write_text(f"{name}\n")
    text = (place / "c.yaml").read_text().replace(
        "  - kind: files", f"  - {{kind: files, name: g, paths: ['{place}/more/*.txt']}}\n  - kind: files", 1)
    assert "name: g" in text
    (place / "c.yaml").write_text(text)
    assert call(place, "shard", copy_corpus) == call(place, "tokenizer", count_bytes) == 0
    return place


def ask(place, stages, *overrides, **options):
    """As the launcher does before it starts anything; returns the jobs."""
    run = run_of(place, *overrides)
    request = Options("local", str(place / "c.yaml"), tuple(overrides), **options)
    jobs = plan(run.config, run, parse_stages(stages), request)
    refuse_unusable_inputs(run, jobs, request)
    say_absent(run, jobs)
    return jobs


def refused(capsys, place, stages, *overrides, **options):
    """What the launcher says, and that the stage itself says so too."""
    text = refusal.refused(UserError, "stage", ask, place, stages, *overrides, **options)
    flags = [f"--{name.replace('_', '-')}" for name in options]
    assert stage_main(parse_stages(stages)[0], never, ["--config", str(place / "c.yaml"), *flags, *overrides]) == 2
    printed = capsys.readouterr().err
    assert text.split("Ways to continue")[0] in printed
    return text


def test_a_source_that_grew_is_refused_whatever_stage_is_asked_for(made, capsys):
    with open(made / "corpus.txt", "a") as file:
        file.write("one more line\n")
    for stage in ("tokenizer", "encode"):
        text = refused(capsys, made, stage)
        assert "stage shard" in text and "input file t/corpus.txt has other content: " in text and " -> " in text
        assert f"--stage shard,{stage}" in text
    assert "has other content" in refused(capsys, made, "encode", force=True)
    refusal.refused(UserError, "has other content", ask, made, "encode", "name=b", f"reuse={made}/runs/a")
    assert "has other content" in refused(capsys, made, "shard", accept_changes=True), "data stages are rebuilt"


def test_what_became_of_the_model_is_said_where_files_were_added_to_its_source(made, capsys):
    for name in "345":
        (made / f"more/{name}.txt").write_text(name)
    text = refused(capsys, made, "shard")
    assert "overwritten: input file g/3.txt is new (and so 2 more)\n" in text and "reuse" not in text
    assert "; or --stage all --force to rebuild it; or name=<another>" in text
    train = made / "runs/a/train"
    train.mkdir()
    write_state(train, "preempted")
    assert str(train) not in refused(capsys, made, "shard"), "there is nothing to lose yet"
    write_text(train / "checkpoints/step-00000040/COMPLETE.json", "{}")
    text = refused(capsys, made, "shard")
    assert f"; or to train the model in {train} (step 40) further, on old and new" in text
    assert f"--force to rebuild it, which starts training again from step 0, renames {train} (step 40)" in text


def test_other_paths_are_refused_with_old_and_new(made, capsys):
    (made / "other.txt").write_text("some other text\n")
    other = f"shard.sources.1.paths=[{made}/other.txt]"
    for overrides in ([other], ["name=b", f"reuse={made}/runs/a", other]):
        text = refused(capsys, made, "encode", *overrides)
        assert f'shard.sources.1.paths.0: "{made}/corpus.txt" -> "{made}/other.txt"' in text
        assert "input file t/other.txt is new" in text and "input file t/corpus.txt is gone" in text
    (made / "other.txt").unlink()
    (made / "corpus.txt").unlink()
    text = refused(capsys, made, "encode", other)
    assert f'"{made}/corpus.txt" -> "{made}/other.txt"' in text, "it was never read, whether it is there or not"


@pytest.mark.parametrize("gone", [["corpus.txt"], ["more/one.txt", "more/two.txt"],
                                  ["corpus.txt", "more/one.txt", "more/two.txt"]])
def test_sources_that_were_deleted_have_not_changed_and_that_is_said_once(made, capsys, gone):
    for name in gone:
        (made / name).unlink()
    assert call(made, "shard", never) == 0
    for check in (lambda *reused: ask(made, "shard,tokenizer", *reused),
                  lambda *reused: call(made, "encode", count_bytes_again, *reused)):
        capsys.readouterr()
        assert check("name=b", f"reuse={made}/runs/a") != 2
        printed = capsys.readouterr().out
        assert printed.count("not there any more") == 1 and f"{len(gone)} of the files that the stage shard" in printed
    if "corpus.txt" not in gone:  # what is there is looked at as ever
        (made / "corpus.txt").write_text("other\n")
        assert "t/corpus.txt has other content" in refused(capsys, made, "encode")


def test_names_below_a_common_folder_do_not_change_because_files_are_gone(place, refusal):
    """The common folder of what is left is another."""
    for name in ("x/one.txt", "y/two.txt", "y/three.txt"):
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text(name)
    paths = f"shard.sources.0.paths=[{place}/x/one.txt, {place}/y/*.txt]"
    assert call(place, "shard", copy_corpus, paths) == 0
    (place / "x/one.txt").unlink()
    assert call(place, "tokenizer", count_bytes, paths) == 0
    (place / "y/two.txt").write_text("changed")
    assert "input file t/y/two.txt has other content" in refusal("tokenizer", paths)


def test_a_stage_made_of_an_earlier_version_of_another_is_refused_further_on(made, capsys):
    """The tokenizer is of the shards that were, encode would be of both. Equal outputs are no other version."""
    assert call(made, "shard", copy_corpus, "--force") == 0
    ask(made, "encode")
    (made / "more/one.txt").write_text("other text\n")
    assert call(made, "shard", copy_corpus, "--force") == 0
    text = refused(capsys, made, "encode")
    assert "The stage tokenizer" in text and "outputs of the stage shard: " in text


def test_a_stage_before_that_was_deleted_has_not_changed(made):
    assert call(made, "encode", count_bytes_again) == 0
    for path in (made / "runs/a/shard").iterdir():
        path.unlink()
    assert run_of(made).changed("tokenizer") == []
    ask(made, "train")


def test_a_job_goes_on_with_what_its_submission_began(made, capsys):
    """Nobody is there at night to answer for a corpus that has grown; it was asked for when the jobs were queued."""
    assert call(made, "encode", lambda work: None, *in_chain("c1")) == 1
    (made / "corpus.txt").write_text("other text\n")
    assert call(made, "encode", count_bytes_again, *in_chain("c1")) == 0
    printed = capsys.readouterr().out
    assert "continues as it was submitted" in printed and "t/corpus.txt has other content" in printed
    (made / "runs/a/encode/manifest.json").unlink()
    assert call(made, "encode", never, *in_chain("c2")) == 2
