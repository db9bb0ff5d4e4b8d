"""Secrets that must not be written to files. Others can read a run's configuration, its job scripts and its copy of the
code.

A setting is judged by its value (tokens of known forms, passwords in URLs, values of the shell's own secrets) and by
its name: by whole words, so that TOKENIZERS_PARALLELISM is no token. No message contains a value.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

from drover.launch.processes import Environment
from drover.pipeline.config.section import flatten
from drover.pipeline.config.tree import Config

_START = r"(?<![A-Za-z0-9_-])"
KNOWN = {
    "a Hugging Face token": rf"{_START}hf_(?:[A-Za-z0-9]{{30,}}|(?=[A-Za-z]*[0-9])[A-Za-z0-9]{{12,}})",
    "an API key": rf"{_START}(?:sk-(?=[A-Za-z_-]*[0-9])[A-Za-z0-9_-]{{16,}}|[sr]k_live_[A-Za-z0-9]{{16,}}|"
                  rf"nvapi-[A-Za-z0-9_-]{{20,}}|AIza[A-Za-z0-9_-]{{30,}})",
    "a GitHub token": rf"{_START}(?:gh[pousr]_[A-Za-z0-9]{{16,}}|github_pat_\w{{20,}})",
    "a GitLab token": rf"{_START}gl(?:pat|dt|rt|cbt|ptt|agent)-[A-Za-z0-9_-]{{12,}}",
    "an AWS key": rf"{_START}(?:AKIA|ASIA)[A-Z0-9]{{16}}(?![A-Za-z0-9])",
    "a Slack token": rf"{_START}xox[abeoprs]-[A-Za-z0-9-]{{10,}}",
    "a URL that grants access": r"[?&](?:X-Amz-Signature=[0-9a-f]{32,}|X-Goog-Signature=[0-9a-f]{32,}|"
                                          r"sig=[A-Za-z0-9%/+_=-]{20,})|"
                                          r"hooks\.slack\.com/(?:services|workflows)/[A-Z0-9]{6,}/[A-Za-z0-9/]{10,}|"
                                          r"discord(?:app)?\.com/api/webhooks/[0-9]+/[A-Za-z0-9_-]{20,}",
    "a key of an Azure account": r"(?:AccountKey|SharedAccessKey)=[A-Za-z0-9+/=]{20,}",
    "a Vault token": rf"{_START}hv[sbr]\.[A-Za-z0-9_-]{{20,}}",
    "a Databricks token": rf"{_START}dapi[0-9a-f]{{32}}(?![0-9a-f])",
    "a package registry's token": rf"{_START}(?:npm_[A-Za-z0-9]{{30,}}|pypi-[A-Za-z0-9_-]{{30,}}|"
                                  rf"dckr_pat_[A-Za-z0-9_-]{{20,}})",
    "a signed token (JWT)": rf"{_START}eyJ[A-Za-z0-9_-]{{8,}}\.[A-Za-z0-9_-]{{8,}}\.[A-Za-z0-9_-]*",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----",
    "a password in an address": r"\b[a-z][a-z0-9+.-]*://[^\s/@:'\"{}$]*:(?![$<{*])[^\s/@'\"]+@",
    "a header with a credential": r"(?i:authorization)\s*:\s*(?i:bearer|basic|token)\s+(?!\$)[^\s'\"]{8,}",
}
"""Forms of values that are secrets whatever their name is."""
PASSWORDS = frozenset(("SECRET", "SECRETS", "PASSWORD", "PASSWORDS", "PASSWD", "PASSPHRASE", "CREDENTIAL",
                       "CREDENTIALS"))
"""Words in names whose values are always secrets."""
TOKENS = PASSWORDS | {"TOKEN", "APIKEY", "PRIVATE"}
"""Those, and words in names whose values are secrets unless they are a number, a switch or a path."""
AUTHORISED = TOKENS | {"AUTH", "AUTHORIZATION", "BEARER", "COOKIE", "DSN", "KEY", "KEYS", "LOGIN", "PASS", "PAT", "PWD",
                       "SESSION", "SIGNATURE", "TOKENS"}
"""Those, and words in names whose values are secrets if they look random."""
HASHES = frozenset(("CHECKSUM", "COMMIT", "DIGEST", "FINGERPRINT", "GIT", "HASH", "MD5", "MD5SUM", "REV", "REVISION",
                    "SHA", "SHA1", "SHA1SUM", "SHA256", "SHA256SUM"))
"""Words in names and commands whose hexadecimal values are public."""
LEAST_DISTINCT = 8
"""A value with fewer different characters does not look random."""
_ASSIGNED = re.compile(r"(?<![\w$])([A-Za-z_]\w*)=(\"[^\"]*\"|'[^']*'|[^\s;,]*)")
_GIVEN = re.compile(r"--([a-z][a-z-]*)[= ](\"[^\"]+\"|'[^']+'|[^\s;,-][^\s;,]*)")
_HEX = re.compile(r"(?<![\w@/:=.-])(?:[0-9a-f]{32}|[0-9a-f]{40}|[0-9a-f]{64})(?![\w@/:.-])", re.I)
"""Keys of many services look like this, Weights & Biases' and Datadog's among them; so do hashes."""
_HARMLESS = re.compile(r"|[-+]?[0-9][0-9_.]*(?:[eE][-+]?[0-9]+)?|(?i:true|false|yes|no|on|off|none|null)|[~.]?/.*|~|"
                       r"[$`].*")
"""Nothing, numbers, switches, paths, and shell substitutions."""
_NEXT = re.compile(r"&&|\|\||[;\n]")
"""What is between two commands; not a pipe, by which a hash reaches `sha256sum -c`."""
LEAST_SHARED = 8
"""Shorter values of the shell's secrets are not searched for in settings."""
LARGEST = 1 << 20
"""Larger files (in bytes) are not searched; configurations and code are smaller."""
HOLDS = ("{key} contains what looks like a secret{what}, and would be written to files. Set {name} in the shell that "
         "submits (`export {name}=...`) and put only its name into launch.secrets; or write it into a file that only "
         "you can read (chmod 600) and source that file in launch.setup{rest}.")
_OF_JOBS = re.compile(r"launch\.(environment|setup|wrap|srun_args|health_check|container\.options|(\w+\.)?extra)\b")
"""Settings in which names of variables and options are judged too."""
_VARIABLE = re.compile(r"launch\.(environment|(\w+\.)?extra)\.(?!export$)")
"""Settings whose key ends with such a name."""


def credential_problems(config: Config, environment: Environment) -> list[str]:
    """Every setting that contains what looks like a secret, with what to do instead.

    environment: of the shell that submits.
    """
    launch, found = config.launch, list[str]()
    shell = {name: secret for name, secret in environment.items() if len(secret) >= LEAST_SHARED and (
        name in launch.secrets or known_form(secret) or (words_of(name) & TOKENS and is_random(secret)))}
    settings = config.model_dump(mode="json")
    for name in ("wrap", "srun_args", "health_check"):
        settings["launch"][name] = " ".join(settings["launch"][name])  # `--token` and `abc` are two items there
    settings["launch"]["container"]["options"] = " ".join(launch.container.options)
    for key, value in flatten(settings).items():
        if isinstance(value, bool) or value is None:
            continue
        own = key.rpartition(".")[2] if _VARIABLE.match(key) else ""
        text = f"{own}={value}" if own else str(value)
        if kind := known_form(text):
            found.append(HOLDS.format(key=key, what=f" ({kind})", name=own or "NAME", rest=""))
        for name, given in [*_ASSIGNED.findall(text), *_GIVEN.findall(text)] if _OF_JOBS.match(key) else ():
            if name not in launch.not_secrets and is_secret(name, given) and not known_form(f"{name}={given}"):
                found.append(HOLDS.format(key=key, what=f", {name}", name=name.replace("-", "_"),
                                          rest=f"; if it is no secret, set launch.not_secrets=[{name}]"))
        if _OF_JOBS.match(key) and not own and any(
                _HEX.search(re.sub("|".join((_ASSIGNED.pattern, _GIVEN.pattern)), "", command))
                and not words_of(command) & HASHES for command in _NEXT.split(text)):
            found.append(HOLDS.format(key=key, what=" (hexadecimal digits, as keys of many services have)", name="NAME",
                                      rest="; if it is a hash, name it as one: COMMIT=..."))
        found += [f"{key} contains the value of your shell's {name}, and would be written to files. Remove it and put "
                  f"{name} into launch.secrets." for name, secret in shell.items() if secret in text]
    return found


def is_secret(name: str, value: str) -> bool:
    """Whether a variable is a secret by its name, unless its value shows that it is none."""
    words, value = words_of(name), value.strip().strip("\"'")
    if value[:1] in ("$", "`", ""):
        return False
    if words & PASSWORDS:
        return not re.match(r"[~.]?/", value)
    if _HARMLESS.fullmatch(value):
        return False
    if _HEX.fullmatch(value):
        return not words & HASHES
    last = re.split(r"[_-]", name.upper())[-1]
    return bool(words & TOKENS) or last == "KEY" or bool(words & AUTHORISED and is_random(value))


def is_random(value: str) -> bool:
    """Whether a value looks random: long, without blanks, of letters and digits, many of them different."""
    return len({*value}) >= LEAST_DISTINCT and re.fullmatch(r"(?=.*[0-9])(?=.*[A-Za-z])\S{16,}", value) is not None


def known_form(text: str) -> str:
    """The kind of secret that a text contains; empty if there is none of a known form."""
    return next((what for what, pattern in KNOWN.items() if re.search(pattern, text)), "")


def words_of(name: str) -> set[str]:
    """The words of a name such as `HF_TOKEN`, `apiKey` or `api-key`, in capitals."""
    split = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    words = [word for word in re.split(r"[^A-Za-z0-9]+", split.upper()) if word]
    return {*words, *("APIKEY" for pair in pairwise(words) if pair == ("API", "KEY"))}


def files_with_secrets(folder: Path, names: Iterable[Path]) -> dict[str, str]:
    """Files, relative to `folder`, that contain a secret of a known form, with its kind."""
    found = {}
    for name in names:
        path = folder / name
        if path.stat().st_size <= LARGEST and (what := known_form(path.read_text(errors="replace"))):
            found[name.as_posix()] = what
    return found
