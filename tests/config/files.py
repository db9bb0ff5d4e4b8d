"""What is said of a configuration that is refused."""

import pytest

from drover.pipeline.config.loading import load_config
from drover.pipeline.core.errors import UserError


def refusal(path, *overrides, check=True):
    """The error with which a configuration is refused."""
    with pytest.raises(UserError) as caught:
        load_config(path, overrides, check=check)
    return str(caught.value)
