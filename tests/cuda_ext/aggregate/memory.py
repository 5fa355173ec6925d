"""A run of `splatfacto-aggregate` on a device that lacks memory: it keeps its model, and another device goes on."""

from collections.abc import Callable
from pathlib import Path

import pytest

from ns_multigpu.plugin.faults.signals import RanOutOfMemory
from tests.cuda_ext.aggregate.training import ALL, ONE, trained
from tests.lib.training_run import write_capture


def test_the_step_before_is_saved_and_resumed(use: Callable[..., None], tmp_path: Path) -> None:
    write_capture(tmp_path / "capture", wide=False)
    use(2, small_bytes=64, host_bytes=100_000)  # suffices for Adam's first step, not for moments and a second one
    with pytest.raises(RanOutOfMemory, match=r"memory on one of its GPUs in step 1: 60 Gaussians(.|\n)*num-devices"):
        trained(ALL, tmp_path / "capture", tmp_path / "all")
    (saved,) = (tmp_path / "all").glob("**/nerfstudio_models/*.ckpt")
    assert saved.name == "step-000000000.ckpt"
    resumed = trained(ONE, tmp_path / "capture", tmp_path / "one", load_checkpoint=saved)
    assert resumed._start_step == 1
