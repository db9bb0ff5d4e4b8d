"""Secrets that must not be written to files. Others can read a run's configuration, its job scripts and its copy of the
code.

A setting is judged by its value (tokens of known forms, passwords in URLs), and a variable of `launch.environment` also
by its name. No message contains a value.
"""

from __future__ import annotations

import re

from drover.pipeline.config.section import flatten
from drover.pipeline.config.tree import Config

KNOWN = {
    "a Hugging Face token": r"\bhf_[A-Za-z0-9]{30,}",
    "an API key": r"\bsk-(?=[\w-]*[0-9])[\w-]{16,}|\bnvapi-[\w-]{20,}|\bAIza[\w-]{30,}",
    "a GitHub token": r"\bgh[pousr]_[A-Za-z0-9]{16,}|\bgithub_pat_\w{20,}",
    "a GitLab token": r"\bgl(?:pat|dt|rt)-[\w-]{12,}",
    "an AWS key": r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b",
    "a Slack token": r"\bxox[abeoprs]-[A-Za-z0-9-]{10,}",
    "a URL that grants access": r"[?&](?:X-Amz-Signature|X-Goog-Signature|sig)=[\w%/+=-]{20,}",
    "a key of an Azure account": r"(?:AccountKey|SharedAccessKey)=[A-Za-z0-9+/=]{20,}",
    "a signed token (JWT)": r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----",
    "a password in an address": r"\b[a-z][a-z0-9+.-]*://[^\s/@:'\"{}$]*:(?![$<{*])[^\s/@'\"]+@",
    "a header with a credential": r"(?i:authorization)\s*:\s*(?i:bearer|basic|token)\s+(?!\$)[^\s'\"]{8,}",
}
"""Forms of values that are secrets whatever their name is."""
NAMES = frozenset(("APIKEY", "AUTH", "CREDENTIAL", "CREDENTIALS", "KEY", "PASSWD", "PASSWORD", "SECRET", "TOKEN"))
"""What the names of variables end in whose values are secrets."""
_HARMLESS = re.compile(r"|[-+]?[0-9][\w.]*|(?i:true|false|yes|no|on|off|none|null)|[~.]?/.*|[$`].*")
"""Nothing, numbers, switches, paths, and shell substitutions."""


def credential_problems(config: Config) -> list[str]:
    """Every setting that contains what looks like a secret, with what to do instead."""
    problems = list[str]()
    for key, value in flatten(config.model_dump(mode="json")).items():
        name = key.removeprefix("launch.environment.")
        named = name not in (key, *config.launch.not_secrets) and is_secret(name, str(value))
        if what := known_form(str(value)) or name * named:
            allowed = f"; if it is no secret, set launch.not_secrets=[{name}]" * (what == name)
            problems.append(
                f"{key} contains what looks like a secret ({what}), and would be written to files. Set the variable in "
                f"the shell that submits (`export NAME=...`) and put only its name into launch.secrets; or write it "
                f"into a file that only you can read (chmod 600) and source that file in launch.setup{allowed}.")
    return problems


def is_secret(name: str, value: str) -> bool:
    """Whether a variable is a secret by its name, unless its value shows that it is none."""
    return name.upper().rpartition("_")[2] in NAMES and not _HARMLESS.fullmatch(value)


def known_form(text: str) -> str:
    """The kind of secret that a text contains; empty if there is none of a known form."""
    return next((what for what, pattern in KNOWN.items() if re.search(pattern, text)), "")
