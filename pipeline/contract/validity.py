"""Whether the outputs of a stage are valid: a pure function of its record and of what the stage would be made from now.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from drover.pipeline.contract.manifest import Difference, Identity, Manifest, differences
from drover.pipeline.contract.start_record import StartRecord
from drover.pipeline.core.console import first

Kind = Literal["done", "resumable", "changed", "absent"]
OTHER_FILES = "some of its input files are new, missing or changed since it was started"
KEEPS = "will be made with the current settings; results that still fit are kept"


@dataclass(frozen=True)
class State:
    """The state of a stage's folder (`stage_state`).

    differences: what has changed since the record was written. reasons: sentences with details.
    """

    kind: Kind
    differences: list[Difference] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        if self.kind == "changed":
            return f"changed: {first([str(difference) for difference in self.differences], 2)}"
        return self.kind + (f" ({self.reasons[0]})" if self.reasons else "")


def stage_state(record: Manifest | StartRecord | None, present: Identity, *, missing: Sequence[str] = (),
                keeps: bool = False, useful: bool = True) -> State:
    """The state of a stage.

    | record   | differences | and                          | state     |
    |----------|-------------|------------------------------|-----------|
    | none     |             |                              | absent    |
    | manifest | none        |                              | done      |
    | manifest | none        | something is missing         | resumable |
    | manifest | some        |                              | changed   |
    | manifest | some        | results that fit are kept    | resumable |
    | start    | none        |                              | resumable |
    | start    | some        |                              | changed   |
    | start    | some        | results that fit are kept    | resumable |
    | start    | some        | no finished work is of use   | absent    |

    Args:
        record: the manifest of a finished stage, the start record of an unfinished one, or neither.
        present: the identity that the stage would have now; `places` only for a finished one.
        missing: messages about outputs or uploads that a finished stage does not have.
        keeps: whether the stage itself keeps those results that still fit.
        useful: whether the stage has finished work that would be lost.
    """
    if record is None:
        return State("absent")
    changed = record_differences(record, present)
    if changed and keeps:
        return State("resumable", changed, [KEEPS])
    if changed and (useful or isinstance(record, Manifest)):
        return State("changed", changed)
    if changed:
        return State("absent", changed, ["was not finished; starts from scratch with the new input"])
    if isinstance(record, Manifest):
        return State("resumable", reasons=[*missing]) if missing else State("done")
    files = record.fingerprint.get("listing") != present.get("listing")
    return State("resumable", reasons=["will continue" + f"; {OTHER_FILES}" * files])


def record_differences(record: Manifest | StartRecord, present: Identity) -> list[Difference]:
    """What has changed since the record was written."""
    places = {"places": record.places} if isinstance(record, Manifest) else {}
    return differences({**record.fingerprint, **places}, present)
