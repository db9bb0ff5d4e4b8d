"""Drover: raw text to a pretrained, evaluated Llama 3 decoder in Hugging Face form, in one restartable chain.

The folders next to this file are links to those at the top of the repository. An installed package, and the copy of the
code that Slurm jobs run, contain the files themselves. So all code is imported as `drover.*`, wherever it lies.
"""

import sys
from types import TracebackType

if sys.version_info < (3, 11):  # noqa: UP036 - whoever has an older one reads this, and not a SyntaxError
    sys.stderr.write(f"error: Drover needs Python 3.11 or newer, and {sys.executable} is {sys.version.split()[0]}.\n"
                     f"In the checkout: make setup PYTHON=/path/to/python3.11, then source .venv/bin/activate.\n")
    sys.exit(2)


def _explain(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Name a package that Drover imports and that is not installed, in place of a traceback. After Ctrl-C say that."""
    if kind is KeyboardInterrupt:
        sys.stderr.write("\ninterrupted\n")
        return
    last = trace
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    importer = "" if last is None else str(last.tb_frame.f_globals.get("__package__"))
    if name is None or "." in name or importer.partition(".")[0] != "drover":
        _before(kind, error, trace)
    else:
        sys.stderr.write(f"error: the package {name} is not installed for {sys.executable}.\n"
                         f"In the checkout: make setup, then source .venv/bin/activate, and give the command again.\n")


_before, sys.excepthook = sys.excepthook, _explain
