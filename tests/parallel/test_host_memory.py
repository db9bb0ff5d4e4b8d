"""What the C library does with freed memory, seen by the pages that the kernel has to hand out."""


import pytest

from drover.pipeline.parallel import host_memory
from tests.conftest import run_python

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


def test_another_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(host_memory.ctypes, "CDLL", lambda name: object())
    host_memory.keep_freed_memory()
    host_memory.always_return_freed_memory()
