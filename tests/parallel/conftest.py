"""What the tests of this folder share."""

import pytest

from tests.parallel.groups import end_groups


@pytest.fixture(scope="module", autouse=True)
def groups_end():
    """Ranks that wait for another case cost processor time, which the tests after these want."""
    yield
    end_groups()
