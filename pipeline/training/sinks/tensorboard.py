"""TensorBoard's files in the run folder: `tensorboard --logdir runs`."""

from __future__ import annotations

from typing import Any

from pipeline.training.sinks.base import About, Sink, SinkSettings, checkpoint_curves, curves


class TensorBoard(SinkSettings):
    """Curves and sample texts in `tensorboard/` of the run folder.

    Steps after the checkpoint that a start continues from are done again: TensorBoard drops its old points of them.
    """

    def open(self, about: About) -> Sink:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(f"the package tensorboard is not installed ({error}); metrics.jsonl has "
                              f"everything") from None
        return _Board(SummaryWriter(str(about.run_folder / "tensorboard"), purge_step=about.first_step + 1))


class _Board:
    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def step(self, record: dict[str, Any]) -> None:
        for name, value in curves(record).items():
            self._writer.add_scalar(name, value, record["step"])

    def sample(self, step: int, prompt: str, text: str) -> None:
        self._writer.add_text(f"samples/{prompt.strip()[:40] or 'empty'}", f"```\n{prompt}{text}\n```", step)

    def event(self, kind: str, details: dict[str, Any]) -> None:
        for name, value in checkpoint_curves(kind, details).items():
            self._writer.add_scalar(name, value, details["step"])

    def close(self) -> None:
        self._writer.close()
