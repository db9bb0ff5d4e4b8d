import pytest

from drover.pipeline.reporting.facts import shareable
from tests.refusal import table


@pytest.mark.parametrize(("text", "shared"), [("runs_dir: /home/me/runs\n", "runs_dir: …/runs\n"), *table("""
    paths: [/home/me/data/notes/**/*.txt, data/x/y.txt] -> paths: […/**/*.txt, data/x/y.txt]
    "/Users/me/a/b/c" -> "…/b/c"
    (/data/web) -> (…/data/web)
    in /data/web. -> in …/data/web.
    /mnt/store/x/y -> …/x/y
    s3://bucket/a/b/c -> s3://bucket/a/b/c
    1/2/3 and a/b/c/d -> 1/2/3 and a/b/c/d""")])
def test_paths_are_cut_to_their_ends(text, shared):
    assert shareable(text) == shared
