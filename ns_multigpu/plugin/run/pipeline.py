"""Base of all methods' pipelines: the ranks, helpers of nerfstudio's commands, loading, and evaluation in lockstep."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar, Literal

import torchvision.utils as vutils
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.pipelines.base_pipeline import VanillaPipeline, VanillaPipelineConfig
from nerfstudio.utils.rich_utils import CONSOLE
from rich.progress import track
from torch import Tensor

from ns_multigpu.core.dist.collectives import all_gather_objects, broadcast_object
from ns_multigpu.plugin.blocks.timing import StepTimer
from ns_multigpu.plugin.checkpoint.verify import read_checkpoint_file, step_of
from ns_multigpu.plugin.export.ns_export import stream_for_ns_export
from ns_multigpu.plugin.faults.errors import show_uncaught
from ns_multigpu.plugin.launch.process_world import get_world, set_world
from ns_multigpu.plugin.model.metrics import means
from ns_multigpu.plugin.render import team, viewer
from ns_multigpu.plugin.render.camera_path import check_ns_render
from ns_multigpu.plugin.render.evaluation import HeldOut, RenderedView, held_out_quality, rendered_views
from ns_multigpu.plugin.render.service import RenderService
from ns_multigpu.plugin.run.terminal import print_metrics


@dataclass
class RunPipelineConfig(VanillaPipelineConfig):
    """Base of the pipelines' options, with properties of a method that are needed before its model exists."""

    # No fields: these are no options, and ranks may differ in them.

    has_splats: ClassVar[bool] = False
    """True if the models are of splats."""

    @property
    def checkpoints(self) -> Path | None:
        """Folder of the .ckpt that is about to be loaded, which also holds the model's shards.

        nerfstudio's commands pass only the pipeline's configuration of a run.
        """
        return vars(self).get("_checkpoints")

    @checkpoints.setter
    def checkpoints(self, folder: Path | None) -> None:
        vars(self)["_checkpoints"] = folder

    @property
    def resumed_from(self) -> Path | None:
        """The .ckpt that a run resumes from; None for a new run."""
        return vars(self).get("_resumed_from")

    @resumed_from.setter
    def resumed_from(self, checkpoint: Path | None) -> None:
        vars(self)["_resumed_from"] = checkpoint

    def place(self, device: str) -> str:
        """Return the device of the datamanager and the model, if nerfstudio asks for `device`."""
        return device

    def team_plan(self, state: Mapping[str, Any], checkpoint: Path, devices: team.Devices) -> team.TeamPlan | None:
        """Return the number of these devices that render a saved model, and its spread over them; see `team.begin`.

        Args:
            state: the pipeline's state in the .ckpt `checkpoint`.

        Returns:
            None if unknown.

        Raises:
            InputError: the model cannot be spread to fit the devices.
        """
        raise NotImplementedError

    def most_ranks(self, state: Mapping[str, Any], checkpoint: Path) -> int | None:
        """Return the largest number of ranks that can hold a shard of a saved model; None for no limit.

        Raises:
            InputError: the checkpoint is not of this method.
        """
        raise NotImplementedError

    def memory_remedies(self, on_gpu: bool) -> Sequence[str]:
        """Return remedies if memory runs out, on a GPU or on the host; most helpful first."""
        raise NotImplementedError


class RunPipeline(VanillaPipeline, ABC):
    """Datamanager and model of one rank. No DDP wrapper.

    Attributes:
        renders: renders for evaluations and viewers.
        timer: times the parts of a step.
        team: the helpers of one of nerfstudio's commands; None without.
    """

    config: RunPipelineConfig
    datamanager: Any
    renders: RenderService

    def __init__(
        self,
        config: RunPipelineConfig,
        device: str,
        test_mode: Literal["test", "val", "inference"] = "val",
        world_size: int = 1,
        local_rank: int = 0,
        grad_scaler: Any = None,
    ) -> None:
        viewer.mend()
        self.team: team.Team | None = None
        self.trains = test_mode == "val"
        if not self.trains:
            show_uncaught()
            check_ns_render(gaussians=config.has_splats)
            if config.has_splats:
                stream_for_ns_export()
            config, self.team = team.begin(config, test_mode, config.team_plan)
        device = config.place(device)
        self.world = get_world(str(device))
        self.begin(config, test_mode)
        # nerfstudio sees a world of one: otherwise it would wrap the model in DDP, which densification breaks.
        super().__init__(config, device, test_mode, world_size=1, local_rank=0, grad_scaler=grad_scaler)
        self.timer = StepTimer(self.world.device)
        self.complete()
        if self.team is not None:
            set_world(None)

    @abstractmethod
    def begin(self, config: Any, test_mode: str) -> None:
        """Check options and set up what the datamanager and the model need. `world` is set."""

    @abstractmethod
    def complete(self) -> None:
        """Set up what needs datamanager and model; at least `renders`."""

    @property
    @abstractmethod
    def images_per_step(self) -> float:
        """Images that all ranks together see in a step; for rays, their number over the pixels of a training
        photograph."""

    @property
    @abstractmethod
    def described(self) -> str:
        """Description of what the model is made of."""

    @property
    @abstractmethod
    def memory_facts(self) -> Sequence[str]:
        """Descriptions of what uses this rank's memory in a step."""

    def frames_note(self, cameras: Sequence[Cameras]) -> str:
        """Return a note about frames rendered from these cameras; "" for none."""
        del cameras
        return ""

    # ---- loading ----

    @abstractmethod
    def load_own(self, loaded_state: dict[str, Any], step: int) -> None:
        """Load a .ckpt and this rank's shard next to it. Every rank calls it.

        Args:
            loaded_state: the .ckpt's pipeline. step: its step.

        Raises:
            InputError: shards are missing or damaged, or do not fit the model.
        """

    def load_pipeline(self, loaded_state: dict[str, Any], step: int) -> None:
        """Load as `load_own` does; helpers, if any, load their shards."""
        if self.team is None:
            self.load_own(loaded_state, step)
            return
        models = self.config.checkpoints
        assert models is not None, "it was looked at before there was a team"
        with CONSOLE.status("Loading the model onto all devices"):
            self.team.call("load_file", models / f"step-{step:09d}.ckpt")
            self.load_own(loaded_state, step)
        self.renders.lead_always()

    def load_file(self, path: Path) -> None:
        """Load a .ckpt as `load_own` does. Every rank calls it.

        Raises:
            InputError: it is missing or damaged.
        """
        self.load_own(read_checkpoint_file(path)["pipeline"], step_of(path))

    # ---- evaluation ----

    def get_eval_image_metrics_and_images(self, step: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return metrics and images of one held-out view, chosen by the step. Every rank calls it and gets the same
        metrics.

        Ranks that hold the photograph get the images, rank 0 at least.
        """
        if self.team is not None and self.renders.leads_always:
            return self._with_helpers("get_eval_image_metrics_and_images", step)
        self.eval()
        camera, batch = self.datamanager.next_eval_image(step)
        outputs = self.model.get_outputs_for_camera(camera)
        metrics, images = self.model.get_image_metrics_and_images(outputs, batch) if batch else ({}, {})
        metrics = broadcast_object(metrics, 0, self.world)
        metrics["num_rays"] = int((camera.height * camera.width * camera.size).item())
        self.train()
        return metrics, images

    def held_out_quality(self, most: int) -> HeldOut | None:
        """See `evaluation.held_out_quality`."""
        self.eval()
        found = held_out_quality(self.model, self.datamanager, self.renders, self.world, most)
        self.train()
        return found

    def get_average_eval_image_metrics(
        self, step: int | None = None, output_path: Path | None = None, get_std: bool = False
    ) -> dict[str, float]:
        """Return mean metrics over the held-out views, each rank measuring those whose images it holds. Every rank
        calls it.

        Args:
            step: unused; nerfstudio passes it.
            output_path: folder for the images, if wanted.
            get_std: standard deviations too, as `<metric>_std`.
        """
        if self.team is not None and self.renders.leads_always:
            return self._with_helpers("get_average_eval_image_metrics", step, output_path, get_std)
        self.eval()
        if output_path is not None:
            output_path.mkdir(exist_ok=True, parents=True)
        held = self.datamanager.eval_held()  # on every rank
        views: Iterable[RenderedView] = rendered_views(self.model, self.datamanager, self.renders, self.world)
        rows: dict[int, dict[str, float]] = {}
        if self.world.is_main:
            views = track(views, "Evaluating held-out views", total=len(held), console=CONSOLE, transient=True)
        for view in views:
            index, start = view.index, perf_counter() - view.seconds
            pixels = int((view.camera.height * view.camera.width).item())
            metrics, images = self.model.get_image_metrics_and_images(view.outputs, view.image)
            metrics["num_rays_per_sec"] = pixels / (perf_counter() - start)
            metrics["fps"] = metrics["num_rays_per_sec"] / pixels
            rows[index] = metrics
            if output_path is not None:
                for name, image in images.items():
                    vutils.save_image(image.permute(2, 0, 1).cpu(), output_path / f"eval_{name}_{index:04d}.png")
        self.train()
        gathered: dict[int, dict[str, float]] = {}
        for part in all_gather_objects(rows, self.world):
            gathered.update(part)
        # Keep the order of the views, so that the mean has the same bits on every world size.
        result = means([gathered[index] for index in sorted(gathered)], deviations=get_std)
        if not self.trains and self.world.is_main:  # ns-eval and ns-multigpu eval
            print_metrics(result, len(gathered))
        return result

    def _with_helpers(self, method: str, *args: Any) -> Any:
        """Call a method on rank 0, which is this process, and on its helpers."""
        assert self.team is not None
        self.team.call(method, *args)
        with self.renders.side_by_side():
            return getattr(self, method)(*args)
