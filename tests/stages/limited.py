"""A stage in a process that may take only so much memory beyond what it imports:

    python -m tests.stages.limited evaluate 100 --config run.yaml ...
"""

import importlib
import os
import resource
import sys
from pathlib import Path

IMPORTED = {"convert": ["transformers", "transformers.models.llama.modeling_llama",
                        "drover.pipeline.formats.comparison"],
            "evaluate": ["drover.pipeline.evaluation.placing", "drover.pipeline.parallel.forward_only",
                         "drover.model.generation.stream",
                         "drover.pipeline.training.rank_agreement"]}

LARGE_TENSORS = {"MALLOC_MMAP_THRESHOLD_": "65536"}
"""For the environment of a process under such a limit: each tensor lies in a mapping of its own, as glibc gives it
above 32 MB. Smaller ones lie in its heap, and aligned pieces that were freed there are not always taken again before
glibc 2.38: one pass in twenty over a model in blocks grew to 232 MB for 12."""


def limit(megabytes):
    """Let this process take so much private memory beyond what it has now."""
    used = next(int(line.split()[1]) * 1024 for line in Path("/proc/self/status").read_text().splitlines()
                if line.startswith("VmData:"))
    most = used + int(megabytes * 1e6)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def main():
    stage, megabytes, *options = sys.argv[1:]
    for name in ("torch", "drover.pipeline.contract.entry", *IMPORTED[stage]):
        importlib.import_module(name)
    from drover.pipeline.contract.entry import stage_main
    body = getattr(importlib.import_module(f"drover.pipeline.{stage}"), stage)
    limit(float(megabytes))
    return stage_main(stage, body, options)


if __name__ == "__main__":
    sys.stdout.flush()
    ended = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(ended)
