"""Secrets: what is taken for one by its name or its value, what to do instead, and that none reaches a file."""

import pytest

from drover.launch.credentials import credential_problems, is_secret, known_form
from drover.pipeline.config.launching import LaunchConfig
from drover.pipeline.config.tree import Config
from drover.pipeline.core.errors import UserError
from tests.launch.launcher import commit, copied, git, holding
from tests.refusal import refused, table

DRAWN = "x9Kq2mZ7pL4vB8nR5tW1cD6fG3hJ0sAyUeQiOx7Zk2Mv9Lp4Bn8Rt5Wc1Df6"
"""Filled into the forms here, so that no file of the repository holds a secret."""
TOKENS = {"key": "-----BEGIN " + "OPENSSH PRIVATE KEY-----\nb3BlbnNz", **{
    kind: form.replace("@@", DRAWN).replace("@16", "A1B2C3D4E5F6G7H8") for kind, form in table("""
    hf -> hf_@@
    openai -> sk-proj-@@
    github -> ghp_@@
    github fine -> github_pat_@@
    gitlab -> glpat-@@
    aws -> AKIA@16
    slack -> xoxb-@@
    google -> AIza@@
    address -> https://me:@@@host.org/data
    azure sas -> https://host/c/b?sp=r&sv=2022-11-02&sig=@@%3D
    azure account -> DefaultEndpointsProtocol=https;AccountKey=@@==
    jwt -> eyJ@@.@@.@@
    header -> curl -H 'Authorization: Bearer @@' https://host""")}}


def problems_of(environment=None, **launch):
    """What is refused of a configuration. environment: of its jobs."""
    return credential_problems(Config(launch=LaunchConfig(environment=environment or {}, **launch)))


@pytest.mark.parametrize("kind", TOKENS)
def test_known_forms_are_refused_wherever_they_stand(kind):
    """With the way to continue, and without the value."""
    token = TOKENS[kind]
    for settings in {"setup": [f"login {token}"]}, {"environment": {"ANYTHING": token}}, {"wrap": ["run", token]}:
        problem, = problems_of(**settings)
        assert "looks like a secret (" in problem and token not in problem
        assert "launch.secrets" in problem and "only you can read" in problem


def test_what_only_looks_like_a_password_in_an_address():
    assert not known_form("https://user:${PASSWORD}@host") and not known_form("http://host:3128/a@b")


@pytest.mark.parametrize("name, value, secret", [("HF_TOKEN", "", False), *table("""
    HF_TOKEN -> abc -> yes
    WANDB_API_KEY -> x1 -> yes
    MY_AUTH -> basic -> yes
    credentials -> me -> yes
    HF_TOKEN -> $(cat ~/.token) -> ''
    HF_TOKEN_PATH -> /home/me/.token -> ''
    DB_PASSWORD_FILE -> /run/secrets/db -> ''
    USE_AUTH_TOKEN -> true -> ''
    NCCL_IB_KEY -> 0x8001 -> ''
    TOKEN_COUNT -> many -> ''
    TOKENIZERS_PARALLELISM -> warning -> ''
    MONKEY -> warning -> ''""", str, str, lambda text: text == "yes")])
def test_names_and_values_together(name, value, secret):
    assert is_secret(name, value) == secret
    assert bool(problems_of({name: value})) == secret


def test_what_is_no_secret_can_be_listed():
    problem, = problems_of({"PAD_TOKEN": "<pad>"})
    assert problem.endswith("if it is no secret, set launch.not_secrets=[PAD_TOKEN].")
    assert not problems_of({"PAD_TOKEN": "<pad>"}, not_secrets=["PAD_TOKEN"])
    assert problems_of({"PAD_TOKEN": TOKENS["hf"]}, not_secrets=["PAD_TOKEN"]), "its name does not change what it is"


def test_the_copy_of_the_code_holds_no_secret(tmp_path):
    """Of a file that is in no commit; and what git ignores stays behind."""
    checkout, run = tmp_path / "checkout", tmp_path / "run"
    mine = checkout / "configs/mine.yaml"
    mine.parent.mkdir(parents=True)
    mine.write_text(f"setup: [login {TOKENS['gitlab']}]\n")
    (checkout / ".gitignore").write_text(".env\n")
    (checkout / "configs/.env").write_text(TOKENS["hf"])
    git(checkout, "init", "-q")
    said = refused(UserError, r"configs/mine\.yaml has a GitLab token", copied, run, checkout)
    assert "launch.secrets" in said and TOKENS["gitlab"] not in said
    assert not run.exists()
    mine.write_text("setup: []\n")
    copied(run, checkout)
    assert not holding(run, *TOKENS.values()), "nor an ignored file"


def test_no_canary_reaches_a_file_or_the_terminal(slurm):
    """The ways that are offered: the shell's variables by name, and a file that the jobs source."""
    canaries = {"HF_TOKEN": TOKENS["hf"], "WANDB_API_KEY": DRAWN, "VAULT": "correct-horse-battery",
                "GIT_PASSWORD": "p4ssw0rd"}
    file = slurm.work.parent / "secrets.sh"
    file.touch(0o600)
    file.write_text(f"export AWS={TOKENS['aws']}\n")
    commit(slurm.checkout)
    git(slurm.checkout, "remote", "add", "origin", TOKENS["address"])
    shown = slurm.accepted("--stage all launch.encode.array=2", f"launch.setup=['. {file}']",
                           "launch.secrets=[HF_TOKEN, VAULT]", "launch.environment={TOKENIZERS_PARALLELISM: 'false'}",
                           **canaries)
    assert len(list(slurm.queue.iterdir())) == 7 and (slurm.run / "code").is_dir()
    secrets = [*canaries.values(), TOKENS["aws"], TOKENS["address"]]
    assert not holding(slurm.work, *secrets) and not any(secret in shown for secret in secrets)
