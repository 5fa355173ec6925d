"""What a block's steps are served: which line each takes, where its report stays, and the image that it is shown."""

from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ns_multigpu.core.plan import Plan
from ns_multigpu.core.types import Patch, View
from ns_multigpu.core.world import World
from ns_multigpu.plugin.blocks import serving
from ns_multigpu.plugin.blocks.serving import Serving

HEIGHT, WIDTH, VIEWS, PLACES = 16, 32, 5, 6
IMAGES = torch.randint(0, 256, (VIEWS, HEIGHT, WIDTH, 3), dtype=torch.uint8)


class Step:
    """Reports the number that it is fed."""

    def __init__(self) -> None:
        self.inputs, self.report, self.seen = torch.zeros(4), torch.zeros(3), list[list[Tensor]]()

    def parts(self, plan: Plan, targets: list[Tensor]) -> Generator[Any, None, list[Tensor]]:
        yield from ()
        self.report.fill_(float(self.inputs[2]))
        self.seen.append([target.clone() for target in targets])
        return []


def feed_of(number: int) -> Any:
    view = View(torch.eye(4), torch.eye(3), WIDTH, HEIGHT)
    indices = [number % VIEWS, (number + 2) % VIEWS]
    return SimpleNamespace(step=number, indices=indices, views=[view, view], inputs=torch.full((4,), float(number)))


@pytest.mark.parametrize("shown", [False, True])
def test_steps_take_line_after_line_from_where_a_block_goes_on(shown: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    images = SimpleNamespace(kept=IMAGES if shown else None, get_smaller=lambda indices, *_: indices)
    monkeypatch.setattr(serving, "DeviceImages", lambda *_: images)
    plan = Plan.of([[]], [[Patch(1, 0, 0, WIDTH, 8, 0), Patch(0, 8, 8, WIDTH, HEIGHT, 0)]])
    parts = [(slice(0, 8), slice(0, WIDTH)), (slice(8, HEIGHT), slice(8, WIDTH))]

    def targets(indices: list[int], *_: Any) -> list[Tensor]:
        return [IMAGES[indices[place], rows, columns] for place, (rows, columns) in zip((1, 0), parts, strict=True)]

    room = torch.zeros(3 * HEIGHT * WIDTH, dtype=torch.uint8)
    first = 3 * 8 * WIDTH
    places = [room[:first].view(8, WIDTH, 3), room[first : first + 3 * 8 * (WIDTH - 8)].view(8, WIDTH - 8, 3)]
    buffers: Any = SimpleNamespace(captures=shown, pictures=room, targets=targets, places=lambda *_: places)
    served = Serving(SimpleNamespace(datamanager=None, model=None), World.single(), PLACES)
    step: Any = Step()
    for block in (100, 200):
        feeds = [feed_of(block + k) for k in range(PLACES)]
        for begin, end in ((0, 4), (2, PLACES)):  # two steps of the first try were not taken
            served.begin(step, begin)
            for k in range(begin, end):
                served.put(k, feeds[k])
                served.ready(buffers, feeds[k], plan, 1)
                with pytest.raises(StopIteration):
                    next(served.parts(buffers, step, feeds[k]))
                for found, expected in zip(step.seen[-1], targets(feeds[k].indices), strict=True):
                    assert torch.equal(found, expected)
        reports = served.reports(PLACES)
        assert torch.equal(reports, (block + torch.arange(float(PLACES)))[:, None].expand(-1, 3))
        step.report.fill_(-1.0)
        assert served.reports(2).shape == (2, 3) and reports.min() >= block, "a block keeps its reports"
