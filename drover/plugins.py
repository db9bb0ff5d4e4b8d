"""The names that plugins need: `from drover.plugins import Filter, Hook, UserError`. docs/extending.md shows each."""

from pydantic import Field

from drover.pipeline.config.optimizers import OptimizerKind
from drover.pipeline.contract.entry import stage_main
from drover.pipeline.contract.stage_work import Work
from drover.pipeline.contract.stages import Stage, register_stage
from drover.pipeline.contract.workers import Task
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import atomic_file, output_record, write_json
from drover.pipeline.data.documents import Document
from drover.pipeline.data.filters.base import Filter
from drover.pipeline.training.hooks import Hook, HookSettings
from drover.pipeline.training.sinks import About, SinkSettings

__all__ = ["About", "Document", "Field", "Filter", "Hook", "HookSettings", "OptimizerKind", "SinkSettings", "Stage",
           "Task", "UserError", "Work", "atomic_file", "output_record", "register_stage", "stage_main", "write_json"]
