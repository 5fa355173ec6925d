"""Fixture of the folder's tests: a run that has saved twice."""

from pathlib import Path

import pytest

from tests.lib.saving import write


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """Return the folder of a run with the checkpoints of steps 1 and 2."""
    folder = tmp_path / "run" / "nerfstudio_models"
    assert write(folder, 1) == write(folder, 2) == ""
    return folder
