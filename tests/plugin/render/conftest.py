"""The capture that tests of this folder render."""

from pathlib import Path

import pytest

from tests.lib.rendering import write_capture


@pytest.fixture(scope="session")
def capture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the capture once."""
    return write_capture(tmp_path_factory.mktemp("capture") / "tiny")
