"""NaN and infinity: found at the next look, named, and left out where asked to; lack of memory, explained."""

import errno

import pytest
import torch

from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.faults.memory import Circumstances, explain
from ns_multigpu.plugin.faults.numerics import NumericGuard, OnNonFinite
from ns_multigpu.plugin.faults.signals import NonFiniteError
from tests.lib.ranks import DEVICES, run_ranks

NAN, INF = float("nan"), float("inf")
device = pytest.mark.parametrize("place", DEVICES)


class Run:
    """Two parameters and their Adams, watched; each step's gradient is ones, times what a test says."""

    def __init__(self, world: World, every: int, mode: OnNonFinite = "stop") -> None:
        self.world, self.said = world, []
        self.guard = NumericGuard(world, every, mode, view_name="frame_{}.png".format, say=self.said.append)
        self.params = {
            "means": torch.nn.Parameter(torch.zeros(5, 3, device=world.device)),
            "none": torch.nn.Parameter(torch.zeros(5, 0, 3, device=world.device)),  # as features_rest without harmonics
            "quats": torch.nn.Parameter(torch.zeros(5, 4, device=world.device)),
        }
        self.optimizers = {name: torch.optim.Adam([p], lr=0.1) for name, p in self.params.items()}
        self.guard.prepare(self.optimizers)

    def step(self, step: int, means: float = 1.0, quats: float = 1.0, loss: float = 1.0) -> None:
        for name, factor in (("means", means), ("quats", quats), ("none", 1.0)):
            self.params[name].grad = torch.full_like(self.params[name], 1.0 + 0.1 * step)
            self.params[name].grad.reshape(-1)[-1:] *= factor
        views = {10 * step + 2 * self.world.rank + i: torch.ones((), device=self.world.device) for i in range(2)}
        views[10 * step + 2 * self.world.rank + 1] *= loss
        if self.guard.watch(step, views, self.params, self.optimizers):
            for optimizer in self.optimizers.values():
                optimizer.step()

    def look(self, step: int, *, now: bool = False) -> None:
        self.guard.look(step, self.params, now=now)


def place_of(name: str) -> World:
    return World.single("cuda:0" if name == "cuda" else name)


@device
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_nonfinite_gradient_is_named_at_the_next_check(place: str, value: float) -> None:
    run = Run(place_of(place), every=4)
    run.step(0)
    run.look(0)
    run.step(1, quats=value, loss=value)
    run.look(1)
    run.step(2)
    run.look(2)
    for step in (3, 4):
        run.step(step)
    with pytest.raises(NonFiniteError) as caught:
        run.look(4)
    text = str(caught.value)
    assert "Steps 1 to 4" in text and "step 1: loss of frame_11.png; gradient of quats" in text
    assert "step 0:" not in text and "gradient of means" not in text and "frame_10" not in text
    assert "parameter quats: 1 row" in text and "parameter means" not in text


@device
def test_huge_but_finite_numbers_are_fine(place: str) -> None:
    run = Run(place_of(place), every=1)
    run.step(0, means=1e38, loss=-1e38)
    run.look(0)


@device
def test_nonfinite_parameter_alone_is_found(place: str) -> None:
    run = Run(place_of(place), every=2)
    run.step(0)
    run.look(0)
    run.step(1)
    run.params["means"].data[2:4, 1] = NAN
    run.look(1)
    run.step(2)
    with pytest.raises(NonFiniteError, match=r"parameter means: 2 row\(s\) hold NaN"):
        run.look(2)


def test_check_precedes_a_save_and_is_not_repeated() -> None:
    run = Run(World.single(), every=100)
    run.step(3, loss=NAN)
    with pytest.raises(NonFiniteError, match=r"frame_31\.png"):
        run.look(3, now=True)
    run.look(3, now=True)
    never = Run(World.single(), every=0)
    never.step(0, loss=NAN)
    never.look(0, now=True)


@device
@pytest.mark.parametrize("value", [NAN, INF])
def test_skipping_leaves_a_step_out_altogether(place: str, value: float) -> None:
    """As if the step had never been: parameters, moments and the count of steps."""
    disturbed, plain = Run(place_of(place), 5, "skip"), Run(place_of(place), 5, "skip")
    for step in range(5):
        disturbed.step(step, means=value if step == 2 else 1.0)
        if step != 2:
            plain.step(step)
    disturbed.look(5)
    for name, param in disturbed.params.items():
        assert torch.equal(param, plain.params[name]), name
        ours, theirs = (run.optimizers[name].state[run.params[name]] for run in (disturbed, plain))
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert float(disturbed.params["means"].abs().min().detach()) > 0
    assert len(disturbed.said) == 1 and "1 step(s) left out" in disturbed.said[0]
    assert "step 2: gradient of means (views of the step: frame_20.png, frame_21.png)" in disturbed.said[0]


def _skip_on_shards(world: World) -> list[torch.Tensor]:
    """Each rank has points of its own, and rank 1 once a bad gradient. Returns parameters, moments, counts of steps."""
    run = Run(world, 5, "skip")
    run.guard.replicated = False
    for step in range(5):
        run.step(step, means=NAN if world.rank == 1 and step == 2 else 1.0)
    run.look(5)
    states = (run.optimizers[name].state[run.params[name]] for name in ("means", "quats"))
    return [*(run.params[name].detach() for name in ("means", "quats")), *(v for s in states for v in s.values())]


def test_sharded_ranks_skip_the_same_steps() -> None:
    plain = Run(World.single(), 5, "skip")
    for step in (0, 1, 3, 4):
        plain.step(step)
    states = [plain.optimizers[name].state[plain.params[name]] for name in ("means", "quats")]
    expected = [plain.params["means"], plain.params["quats"], *(v for s in states for v in s.values())]
    for found in run_ranks(_skip_on_shards, 2):
        assert len(found) == len(expected) == 8
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_skipping_everything_stops() -> None:
    run = Run(World.single(), 4, "skip")
    for step in range(4):
        run.step(step, means=NAN)
    with pytest.raises(NonFiniteError, match="gradient of means"):
        run.look(4)


def test_skipping_cannot_undo_a_bad_parameter() -> None:
    run = Run(World.single(), 1, "skip")
    run.step(0)
    run.params["quats"].data[0] = INF
    with pytest.raises(NonFiniteError, match=r"quats: 1 row"):
        run.look(0)


def _on_two_ranks(world: World) -> str:
    run = Run(world, every=3)
    for step in range(3):
        run.step(step, loss=NAN if world.rank == 1 and step == 1 else 1.0)
        run.look(step)
    run.step(3)
    with pytest.raises(NonFiniteError) as caught:
        run.look(3)
    return str(caught.value)


def test_all_ranks_raise_what_one_has_seen() -> None:
    first, second = run_ranks(_on_two_ranks, 2)
    assert first == second and "step 1: loss of frame_13.png" in first


def _blocks_on_two_ranks(world: World) -> list[str]:
    """Return the check's result after a block: all finite, or a loss or a parameter of rank 1 nonfinite."""
    said: list[str] = []
    for where in ("nowhere", "loss", "parameter"):
        run = Run(world, every=5)
        report = torch.full((5, 2), 3e38)
        if world.rank == 1 and where == "loss":
            report[2, 0] = INF
        if world.rank == 1 and where == "parameter":
            run.params["quats"].data[4, 2] = -INF
        run.guard.note(range(1, 6), [[10 * step + world.rank] for step in range(1, 6)], ("the rows",), report)
        try:
            run.look(5)
            said.append("")
        except NonFiniteError as error:
            said.append(str(error))
    return said


def test_all_ranks_raise_what_a_block_of_one_has_left() -> None:
    first, second = run_ranks(_blocks_on_two_ranks, 2)
    assert first == second
    well, loss, parameter = first
    assert well == "" and "step 3: loss of frame_31.png" in loss and "parameter quats: 1 row(s)" in parameter
    assert "parameter quats" not in loss and "step 3" not in parameter


def test_due_check_needs_no_parameters() -> None:
    run = Run(World.single(), every=4)
    assert not run.guard.due(4, now=True), "nothing has been noted"
    run.step(1)
    assert [step for step in range(1, 9) if run.guard.due(step)] == [4, 8]
    assert run.guard.due(3, now=True)
    run.look(4)
    assert not run.guard.due(8)
    assert not NumericGuard(World.single(), 0).due(0, now=True)


@pytest.mark.gpu
def test_check_synchronizes_once(recwarn: pytest.WarningsRecorder) -> None:
    run = Run(World.single("cuda:0"), 1)
    run.step(0)
    run.look(0)
    run.step(1)
    torch.cuda.synchronize()
    recwarn.clear()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        run.look(1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len([one for one in recwarn if "called a synchronizing" in str(one.message)]) == 1


@pytest.mark.gpu
def test_no_step_waits_for_the_device() -> None:
    for mode in ("stop", "skip"):
        run = Run(World.single("cuda:0"), 100, mode)
        run.step(0)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for step in range(1, 4):
                run.step(step)
                run.look(step)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_skipping_on_a_gpu_needs_an_adam() -> None:
    guard = NumericGuard(World.single("cuda:0"), 1, "skip")
    with pytest.raises(InputError, match="means has RAdam"):
        guard.prepare({"means": torch.optim.RAdam([torch.nn.Parameter(torch.zeros(1, device="cuda"))])})


# ---- steps whose update the device has taken already ----


@device
@pytest.mark.parametrize("value", [NAN, INF])
def test_recorded_step_names_its_nonfinite_value(place: str, value: float) -> None:
    run = Run(place_of(place), every=4)
    report = torch.ones(5, 3, device=run.world.device)  # of each step two views' losses, and what shows the gradients
    report[1, 1] = value
    report[2, 2] = value
    for block in (range(1), range(1, 2), range(2, 5)):
        views = [[10 * step, 10 * step + 1] for step in block]
        run.guard.note(block, views, ("the rows",), report[block.start : block.stop])
        if block.stop < 5:
            run.look(block[-1])
    with pytest.raises(NonFiniteError) as caught:
        run.look(4)
    text = str(caught.value)
    assert "Steps 1 to 4" in text and "step 3" not in text and "step 4" not in text
    assert "step 1: loss of frame_11.png\n" in text
    assert "step 2: gradient of the rows (views of the step: frame_20.png, frame_21.png)" in text


def test_finite_recorded_steps_report_nothing() -> None:
    run = Run(World.single(), every=2)
    for step in range(7):
        run.guard.note([step], [[step]], ("the rows",), torch.tensor([[-1e38, NAN, 1e38]]))
        run.look(step)
    assert run.said == [] and run.guard._noted == [], "what lies behind the views' losses is not looked at"
    never = Run(World.single(), every=0)
    never.guard.note([0], [[0]], ("the rows",), torch.tensor([[NAN, NAN]]))
    never.look(0, now=True)


# ---- memory ----

GPU, HOST = ["images kept on the host"], ["images kept as bytes"]
NOW = Circumstances(2, 130, torch.device("cpu"), ["1,234,567 Gaussians"], GPU, HOST, "runs/x/step-000000100.ckpt")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory: you tried to"),
        torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
        RuntimeError("CUDA error: out of memory"),
    ],
)
def test_out_of_memory_error_has_a_remedy(error: Exception) -> None:
    text = str(explain(error, NOW))
    for word in ("Rank 2", "in step 130", "1,234,567", "kept as bytes", "step-000000100.ckpt", "GiB"):
        assert word in text
    assert "kept on the host" not in text


def test_a_real_lack_of_memory_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert "before the first step" in str(explain(caught.value, Circumstances(0, None, NOW.device)))


def test_other_errors_are_unchanged() -> None:
    for error in (KeyError("x"), RuntimeError("shape mismatch"), OSError(errno.ENOSPC, "No space left on device")):
        assert explain(error, NOW) is None


@pytest.mark.gpu
def test_gpu_error_reports_memory_use() -> None:
    with pytest.raises(torch.cuda.OutOfMemoryError) as caught:
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    text = str(explain(caught.value, Circumstances(0, 3, torch.device("cuda", 0), [], GPU, HOST)))
    assert "its GPU (cuda:0)" in text and "GiB free of" in text and "kept on the host" in text


def test_nonfinite_values_of_pending_steps_are_named_later() -> None:
    """A look that comes when the device has been given more: their numbers are not there yet; what they do may be."""
    guard, params = NumericGuard(World.single(), every=4), {"scales": torch.zeros(3, 2)}
    guard.note([0, 1], [[5], [6]], ("the rows",), torch.zeros(2, 2))
    params["scales"][1] = torch.nan
    guard.look(1, params, now=True, pending=True)
    assert guard.unsure and guard.due(3), "at once, whatever the step"
    guard.note([2, 3], [[7], [8]], ("the rows",), torch.tensor([[0.0, 0.0], [0.0, torch.nan]]))
    with pytest.raises(NonFiniteError) as caught:
        guard.look(3, params)
    text = str(caught.value)
    assert "Steps 0 to 3" in text and "step 3: gradient of the rows" in text and "scales: 1 row(s)" in text
    guard.note([4], [[7]], ("the rows",), torch.full((1, 2), torch.inf))
    with pytest.raises(NonFiniteError, match="step 4"):  # that it was one of the noted needs no other
        guard.look(4, params, now=True, pending=True)


def test_check_during_pending_steps_reports_nothing_if_finite() -> None:
    guard, params = NumericGuard(World.single(), every=4), {"scales": torch.zeros(3, 2)}
    guard.note([0], [[5]], ("the rows",), torch.zeros(1, 2))
    guard.look(4, params, pending=True)
    assert not guard.unsure and not guard.due(4)
