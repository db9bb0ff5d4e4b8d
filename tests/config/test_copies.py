"""Addresses to copy to: wrong ones are found with all else that is wrong, unreachable ones before anything runs."""

from types import SimpleNamespace

import pytest
import yaml

from drover.launch.checks import refuse_unusable_stores
from drover.launch.submit import main
from drover.pipeline.config.tree import Config
from tests.object_store import SECRET


def test_addresses_that_cannot_be_written_to_are_refused_together_before_anything_runs(place, moto_server, capsys):
    bucket = moto_server
    given = yaml.safe_load((place / "c.yaml").read_text())
    given["train"] = {"checkpoint": {"copy_to": f"{bucket.scheme}://no-such-bucket-here/a"}}
    given["convert"] = {"copy_to": bucket.url_of("b")}
    (place / "c.yaml").write_text(yaml.safe_dump(given))
    bucket.fail("refuse", 100, method="PUT", path="/b/")
    submitted = ["--stage", "shard,tokenizer,encode,train,convert", "--config", str(place / "c.yaml"),
                 "--cluster", "local"]
    assert main(submitted) == 2
    message = capsys.readouterr().err
    assert "train.checkpoint.copy_to: " in message and "convert.copy_to: " in message
    assert f" {bucket.scheme}://no-such-bucket-here at this store" in message
    assert SECRET not in message and not (place / "runs").exists()
    assert main([*submitted, "--dry-run"]) == 0, "what is only shown contacts nobody"


@pytest.mark.parametrize("scheme", ["s3", "gs", "az", "abfss"])
def test_a_store_is_not_tried_from_where_there_are_no_keys_for_it(scheme, monkeypatch, capsys):
    """Other variables of a cloud's tools are none."""
    tried, url = [], f"{scheme}://bucket/a"
    monkeypatch.setattr("drover.launch.checks.preflight", tried.append)
    config, jobs = Config.model_validate({"convert": {"copy_to": url}}), [SimpleNamespace(stage="convert", to_run=True)]
    without = {"AWS_PAGER": "", "GOOGLE_CLOUD_PROJECT": "mine", "AZURE_STORAGE_ACCOUNT_NAME": "b"}
    refuse_unusable_stores(config, jobs, without, local=False)
    assert not tried and f"{url} is not tried from here" in capsys.readouterr().out
    for keys in ("AWS_PROFILE", "GOOGLE_APPLICATION_CREDENTIALS", "AZURE_STORAGE_SAS_TOKEN"):
        refuse_unusable_stores(config, jobs, {**without, keys: "x"}, local=False)
    assert len(tried) == 3
