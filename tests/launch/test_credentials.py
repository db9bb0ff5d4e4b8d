"""Secrets: what is taken for one by its name or its value, the way on, and that none reaches a file."""

import base64
import json
import random
import re
import string

import pytest

from drover.launch.credentials import credential_problems, is_secret, known_form
from drover.pipeline.config.launching import LaunchConfig
from drover.pipeline.config.tree import Config
from drover.pipeline.core.errors import UserError
from tests.launch.launcher import commit, git, holding, snapshot_of
from tests.refusal import refused, table

DRAW = random.Random(0)
CHARACTERS = {"": f"{string.ascii_letters}{string.digits}", " upper": f"{string.ascii_uppercase}{string.digits}",
              " hex": "0123456789abcdef"}


def drawn(form):
    """A secret of a form such as `hf_<34>`; made here, so that no file of the repository holds one."""
    return re.sub("<([0-9]+)(.*?)>", lambda gap: "".join(DRAW.choices(CHARACTERS[gap[2]], k=int(gap[1]))), form)


JWT = ".".join(base64.urlsafe_b64encode(text).decode().rstrip("=") for text in (
    b'{"alg":"HS256","typ":"JWT"}', b'{"sub":"1234567890"}', b"signature of it"))
TOKENS = {"jwt": JWT, "key": "-----BEGIN " + "OPENSSH PRIVATE KEY-----\nb3BlbnNz", **dict(table("""
    hf -> hf_<34>
    openai -> sk-proj-<40>
    github -> ghp_<36>
    github app -> ghs_<36>
    github fine -> github_pat_<60>
    gitlab -> glpat-<20>
    aws -> AKIA<16 upper>
    slack -> xoxb-<12>-<24>
    google -> AIza<35>
    npm -> npm_<36>
    pypi -> pypi-<60>
    address -> https://me:<12>@host.org/data
    azure sas -> https://host/c/b?sp=r&sv=2022-11-02&sig=<40>%3D
    azure account -> DefaultEndpointsProtocol=https;AccountKey=<60>==
    vault -> hvs.<90>
    presigned -> https://host/b?X-Amz-Expires=60&X-Amz-Signature=<64 hex>
    slack hook -> https://hooks.slack.com/services/T0<9 upper>/B0<9 upper>/<24>
    databricks -> dapi<32 hex>
    header -> curl -H 'Authorization: Bearer <20>' https://host""", str, drawn))}
WANDB = drawn("<40 hex>")


def found(environment=None, config=None, environment_of_jobs=None, **launch):
    """What is refused of a configuration that is submitted from a shell with `environment`."""
    section = LaunchConfig(environment=environment_of_jobs or {}, **launch)
    return credential_problems(Config(launch=section, **(config or {})), environment or {})


@pytest.mark.parametrize("kind", TOKENS)
def test_known_forms_are_refused_wherever_they_stand(kind):
    """With the way on, and without the value."""
    token = TOKENS[kind]
    source = [{"kind": "files", "name": "t", "paths": [token if kind == "address" else f"/data/{token}"]}]
    for settings in ({"setup": [f"login {token}"]}, {"environment_of_jobs": {"ANYTHING": token}},
                     {"wrap": ["run", token]}, {"extra": {"comment": token}}, {"train": {"extra": {"comment": token}}},
                     {"config": {"shard": {"sources": source}}} if kind != "header" else {"setup": [token]}):
        problem, = found(**settings)
        assert "looks like a secret (" in problem and token not in problem
        assert "launch.secrets" in problem and "only you can read" in problem


def test_what_looks_like_an_address_with_a_password():
    assert not known_form("https://user:${PASSWORD}@host") and not known_form("http://host:3128/a@b")


@pytest.mark.parametrize("name, value, secret", [("HF_TOKEN", "", False), *table(f"""
    TOKEN_COUNT -> 4096 -> false
    HF_TOKEN -> abc -> true
    HF_TOKEN -> $(cat ~/.token) -> false
    HF_TOKEN_PATH -> /home/me/.token -> false
    DB_PASSWORD -> 123456 -> true
    DB_PASSWORD_FILE -> /run/secrets/db -> false
    WANDB_API_KEY -> x1 -> true
    OPENAI_KEY -> abc -> true
    apiKey -> abc -> true
    MY_AUTH -> {WANDB} -> true
    MY_AUTH -> basic -> false
    KEY_COLUMN -> text -> false
    COMMIT -> {WANDB} -> false
    GIT_SHA1 -> {WANDB} -> false
    NICKNAME -> {WANDB} -> true
    RUN_LABEL -> {drawn("<32 hex>")} -> true
    image -> {drawn("<64 hex>")} -> true
    RUN_LABEL -> {WANDB[:39]} -> false
    USE_AUTH_TOKEN -> true -> false
    credentials -> me -> true
    NCCL_IB_PKEY -> 0x8001 -> false
    SESSION_ID -> aaaaaaaaaaaaaaaaaaaa1 -> false
    TOKENIZERS_PARALLELISM -> warning -> false
    MAX_TOKENS -> warning -> false
    MONKEY -> warning -> false
    SECRETARY -> warning -> false
    AUTHOR -> warning -> false""", str, str, json.loads)])
def test_names_and_values_together(name, value, secret):
    assert is_secret(name, value) == secret
    assert bool(found(setup=[f"export {name}='{value}'"])) == secret


@pytest.mark.parametrize(("settings", "secret"), [
    ({"setup": [f"wandb login {WANDB}"]}, True), ({"wrap": ["run", WANDB]}, True),
    ({"extra": {"comment": WANDB}}, True), ({"setup": [f"wandb login {WANDB.upper()}"]}, True),
    ({"wrap": ["run", f"-k{WANDB[:20]}", WANDB[:20].upper() + WANDB[20:]]}, True),
    ({"setup": [f"git checkout {WANDB.upper()}"]}, False),
    ({"setup": [f"git checkout {WANDB}"]}, False), ({"setup": [f"pip install git+https://host/x@{WANDB}"]}, False),
    ({"container": {"image": f"host/x@sha256:{drawn('<64 hex>')}"}}, False),
    ({"setup": [f"cd /data/{WANDB}"]}, False),
    ({"setup": [f"echo '{WANDB}  x.sif' | sha1sum -c && cd git"]}, False),
    ({"setup": [f"cd git && wandb login {WANDB}"]}, True), ({"setup": [f"git pull\nwandb login {WANDB}"]}, True)])
def test_a_key_of_hexadecimal_digits_without_a_name(settings, secret):
    problems = found(**settings)
    assert len(problems) == secret and not any(WANDB in problem for problem in problems)


def test_what_is_no_secret_can_be_said():
    padding = {"PAD_TOKEN": "<pad>"}
    problem, = found(environment_of_jobs=padding)
    assert problem.endswith("if it is no secret, set launch.not_secrets=[PAD_TOKEN].")
    assert not found(environment_of_jobs=padding, not_secrets=["PAD_TOKEN", "token"],
                     setup=["export PAD_TOKEN=pad", "run --token pad"])
    assert found(environment_of_jobs={"PAD_TOKEN": TOKENS["hf"]}, not_secrets=["PAD_TOKEN"]), \
        "its name does not make a token something else"


def test_secrets_of_the_shell_are_recognised_by_their_values():
    """Also those of no known form, wherever they stand."""
    word = "correct-horse-battery"
    problem, = found({"VAULT": word}, {"name": "trial"}, secrets=["VAULT"], setup=[f"login {word}"])
    assert "launch.setup.0 contains the value of your shell's VAULT" in problem and word not in problem
    problem, = found({"WANDB_API_KEY": WANDB}, {"name": f"run-{WANDB}"})
    assert problem.startswith("name contains the value of your shell's WANDB_API_KEY")
    assert not found({"HOME": "/home/me", "GPG_KEY": "short", "VAULT": word}, {"name": word})


def test_a_key_that_is_known_by_its_variable_is_told():
    assert found(environment_of_jobs={"AZURE_AccountKey": drawn("<32>")})


def test_the_copy_of_the_code_holds_no_secret(tmp_path):
    """Of a file that is in no commit; and what git ignores stays behind."""
    checkout, run = tmp_path / "checkout", tmp_path / "run"
    mine = checkout / "configs/mine.yaml"
    mine.parent.mkdir(parents=True)
    mine.write_text(f"setup: [login {TOKENS['gitlab']}]\n")
    (checkout / ".gitignore").write_text(".env\n")
    (checkout / "configs/.env").write_text(TOKENS["hf"])
    git(checkout, "init", "-q")
    said = refused(UserError, r"configs/mine\.yaml has a GitLab token", snapshot_of, run, checkout)
    assert "launch.secrets" in said and TOKENS["gitlab"] not in said
    assert not run.exists()
    mine.write_text("setup: []\n")
    snapshot_of(run, checkout)
    assert not holding(run, *TOKENS.values()), "nor an ignored file"


@pytest.mark.parametrize("cluster", ["local", "slurm"])
def test_nothing_is_written_of_what_is_refused(slurm, cluster):
    said = slurm.refused(f"--stage all --cluster {cluster}", f"launch.environment={{MY_AUTH: {TOKENS['hf']}, "
                         f"TOKENIZERS_PARALLELISM: 'false'}}", f"launch.setup=['export WANDB_API_KEY={WANDB}']")
    assert "launch.environment.MY_AUTH contains what looks like a secret (a Hugging Face token)" in said
    assert "launch.setup.0 contains what looks like a secret, WANDB_API_KEY" in said
    assert "TOKENIZERS" not in said and not slurm.run.exists() and not list(slurm.queue.iterdir())
    assert TOKENS["hf"] not in said and WANDB not in said


def test_no_canary_reaches_a_file_or_the_terminal(slurm):
    """The ways that are offered: the shell's variables by name, and a file that the jobs source."""
    canaries = {"HF_TOKEN": TOKENS["hf"], "WANDB_API_KEY": WANDB, "VAULT": "correct-horse-battery",
                "GIT_PASSWORD": "p4ssw0rd"}
    file = slurm.work.parent / "secrets.sh"
    file.touch(0o600)
    file.write_text(f"export AWS={TOKENS['aws']}\n")
    commit(slurm.checkout)
    git(slurm.checkout, "remote", "add", "origin", TOKENS["address"])
    shown = slurm.accepted("--stage all launch.encode.array=2", f"launch.setup=['. {file}']",
                           "launch.secrets=[HF_TOKEN, VAULT]", "launch.environment={TOKENIZERS_PARALLELISM: 'false'}",
                           **canaries)
    assert len(list(slurm.queue.iterdir())) == 8 and (slurm.run / "code").is_dir()
    secrets = [*canaries.values(), TOKENS["aws"], TOKENS["address"]]
    assert not holding(slurm.work, *secrets) and not any(secret in shown for secret in secrets)
