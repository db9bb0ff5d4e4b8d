"""What the tests of this folder share."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def in_this_process():
    """The harness's bootstrap, which has the same draws in processes of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DISABLE_MULTIPROC", "1")
        yield
