"""What a rank may still take: the least of what host, control groups and the process's own limits leave. What the C
library does with freed memory, seen by the pages that the kernel has to hand out."""

import resource

import pytest
import torch

from drover.pipeline.parallel import host_memory
from drover.pipeline.parallel.host_memory import free_memory
from tests.conftest import run_python

CPU = torch.device("cpu")


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """Function: write a file of a control group; the process is in /job/step of both kinds."""
    (tmp_path / "own").write_text("0::/job/step\n4:cpu,memory:/job/step\n")
    monkeypatch.setattr(host_memory, "CGROUPS", tmp_path / "groups")
    monkeypatch.setattr(host_memory, "OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(host_memory, "_of_host", lambda: 1000)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)

    def write(path, content):
        file = tmp_path / "groups" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    return write


def test_the_least_of_all_counts(groups, monkeypatch):
    assert free_memory(CPU) == 1000
    groups("job/step/memory.max", "max\n")
    groups("job/step/memory.current", "5\n")
    assert free_memory(CPU) == 1000
    groups("job/memory.max", "700\n")  # of the job around the step
    groups("job/memory.current", "140\n")
    groups("job/memory.stat", "anon 60\nactive_file 10\ninactive_file 30\n")  # 40 are copies of files
    assert free_memory(CPU) == 600
    groups("memory/job/step/memory.limit_in_bytes", "450\n")  # the first kind
    groups("memory/job/step/memory.usage_in_bytes", "80\n")
    groups("memory/job/step/memory.stat",
           "inactive_file 1\nactive_file 1\ntotal_inactive_file 25\ntotal_active_file 5\n")
    assert free_memory(CPU) == 400
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert free_memory(CPU) == 100


@pytest.mark.parametrize("kind", [resource.RLIMIT_AS, resource.RLIMIT_DATA])
def test_a_limit_of_the_process_counts(groups, monkeypatch, kind):
    none, limit = resource.RLIM_INFINITY, 2**50
    monkeypatch.setattr(host_memory, "_of_host", lambda: 2**60)
    monkeypatch.setattr(resource, "getrlimit", lambda asked: (limit if asked == kind else none, none))
    assert 0 < free_memory(CPU) < limit
    limit = 1  # less than the process has already
    assert free_memory(CPU) == 0


BLOCKS = """
import resource, sys
if sys.argv[1] == "keep":
    from drover.pipeline.parallel.host_memory import keep_freed_memory
    keep_freed_memory()
def pages():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
bytearray(64 * 2**20)
before = pages()
for _ in range(4):
    bytearray(64 * 2**20)
print((pages() - before) * resource.getpagesize() // 2**20)
"""


def faulted_mb(how: str) -> int:
    """MB that were faulted in while 4 blocks of 64 MB were made and freed, after a first one."""
    return int(run_python("-c", BLOCKS, how).stdout)


def test_a_freed_block_is_used_again():
    if faulted_mb("as it is") < 32:  # huge pages, or another C library
        pytest.skip("large blocks cost no page faults here")
    assert faulted_mb("keep") < 8
