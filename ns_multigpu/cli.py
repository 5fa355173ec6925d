"""The command `ns-multigpu`: functions that nerfstudio's own commands do not have.

A subcommand is a function with documented, typed arguments in COMMANDS; tyro creates its options from them.
"""

import functools
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro

from ns_multigpu.planning.command import plan

Colormap = Literal["default", "turbo", "viridis", "magma", "inferno", "cividis", "gray"]


def city(
    output_path: Path,
    blocks: int = 2,
    capture: Literal["aerial", "street"] = "aerial",
    views: int = 200,
    width: int = 960,
    height: int = 540,
    samples: int = 4,
    seed: int = 0,
    eval_interval: int = 8,
    points: int | None = None,
    time_varying: bool = False,
    car_density: float = 1.0,
    rig: int | None = None,
    altitude: float | None = None,
    layout: Literal["colmap", "dnerf"] = "colmap",
    image_format: Literal["png", "jpg"] = "png",
    depth: Literal["none", "png", "npy"] = "none",
    depth_unit: float = 0.01,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    workers: int = 2,
    overwrite: bool = False,
) -> None:
    """Write a capture of a procedural city, in COLMAP's layout or that of D-NeRF's scenes.

    Args:
        output_path: Folder to write: images/, sparse/0/ and, on request, depth/; with dnerf train/, val/ and test/.
        blocks: Blocks along each side of the city; a block and its road measure 70 m.
        capture: Nadir and oblique views from the air, or views along the roads.
        views: Number of views.
        width: Width of a picture, pixels.
        height: Height of a picture, pixels.
        samples: Rays per pixel.
        seed: Seed of the city and of the camera path.
        eval_interval: Interval of views without seed points, so that they can be held out (nerfstudio's colmap parser
            holds out every 8th); 0 for none.
        points: Number of seed points; by default it follows from the city and the number of views.
        time_varying: Move the cars from view to view; times.txt lists each view's time.
        car_density: Density of cars: 1 for an ordinary day, 0 for none.
        rig: Number of fixed cameras that film at the same moments; by default one moving camera.
        altitude: Height of the cameras above the ground, metres; by default it follows from the capture.
        layout: COLMAP's; or D-NeRF's, for --time-varying: views with times, png pictures, no points and no depth.
        image_format: Format of the pictures.
        depth: Write depth along the camera's axis too: 16-bit png, or float32 npy in metres.
        depth_unit: Metres per step of a 16-bit depth; 0.01 covers 655 m.
        device: Device that renders pictures; auto takes a GPU if available.
        workers: Views rendered in parallel; on a CPU each takes one core.
        overwrite: Write into a folder that is not empty.
    """
    import torch

    from ns_multigpu.city import City, CityCapture, write_colmap, write_dnerf

    if workers < 1:
        raise ValueError(f"workers is {workers}: give at least 1")
    if depth_unit <= 0:
        raise ValueError(f"depth-unit is {depth_unit} m: give more than 0")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is cuda, but no CUDA device was found: give cpu or auto")
    where = "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"
    made = CityCapture(
        City(blocks, seed, car_density), capture, views, width, height, samples, seed, eval_interval, time_varying,
        altitude, cache_bytes=0, rig=rig,
    )  # fmt: skip
    if layout == "dnerf":
        write_dnerf(made, output_path, overwrite=overwrite, device=where, workers=workers, progress=_progress)
        moving = f"--pipeline.model.primitive 4dgs dnerf --data {output_path}"
        print(f"{views} views in {output_path}: ns-train METHOD {moving}")
        return
    write_colmap(
        made, output_path, points=points, image_format=image_format, depth=depth, depth_unit=depth_unit,
        overwrite=overwrite, device=where, workers=workers, progress=_progress,
    )  # fmt: skip
    print(f"{views} views in {output_path}: ns-train METHOD colmap --data {output_path}")


def export(
    load_config: Path,
    output_path: Path,
    step: int | None = None,
    overwrite: bool = False,
    color: Literal["sh_coeffs", "rgb"] = "sh_coeffs",
    obb_center: tuple[float, float, float] | None = None,
    obb_rotation: tuple[float, float, float] | None = None,
    obb_scale: tuple[float, float, float] | None = None,
    save_world_frame: bool = False,
) -> None:
    """Write a run's Gaussians as .ply like ns-export gaussian-splat, .splat, .spz, .sog, or as levels of detail.

    Args:
        load_config: config.yml in the run's folder.
        output_path: File to write: NAME.ply, or for browsers NAME.splat, an eighth of the size and without harmonics;
            or, by the program splat-transform, NAME.spz, of that size with harmonics, NAME.sog, which is smaller, or
            FOLDER/lod-meta.json, three levels of detail.
        step: Step of the checkpoint; by default the newest.
        overwrite: Replace the file if it exists.
        color: Colours: spherical harmonics, or plain red, green and blue.
        obb_center: Centre of a crop box; points outside are omitted. Requires obb-rotation and obb-scale.
        obb_rotation: Rotation of the box: roll, pitch and yaw in radians.
        obb_scale: Size of the box along each of its axes.
        save_world_frame: Write a PLY in the capture's own coordinates, not in those of the model. Positions are double
            if float32 cannot hold them (UTM, ECEF). A box is in the model's coordinates in any case.
    """
    from ns_multigpu.plugin.export.compressed import LEVELS, export_compressed
    from ns_multigpu.plugin.export.ply import crop_box, export_ply, report, run_checkpoint
    from ns_multigpu.plugin.export.splat import export_splat
    from ns_multigpu.plugin.export.world_frame import WorldFrame

    suffix = output_path.suffix
    if suffix not in (".ply", ".splat", ".spz", ".sog") and output_path.name != LEVELS:
        names = f"a .ply, .splat, .spz or .sog file, or {LEVELS}"
        raise ValueError(f"--output-path {output_path}: give the name of {names}.")
    if suffix == ".splat" and color != "sh_coeffs":
        raise ValueError("--color: a .splat file has plain colours in any case. Leave it out.")
    if suffix != ".ply" and save_world_frame:
        raise ValueError(f"--save-world-frame is of .ply files: a {suffix} file has no float64 positions.")
    crop = crop_box(obb_center, obb_rotation, obb_scale)
    checkpoint = run_checkpoint(load_config, step)
    frame = WorldFrame.of_run(load_config) if save_world_frame else None
    write = {".ply": functools.partial(export_ply, frame=frame), ".splat": export_splat}.get(suffix, export_compressed)
    progress = functools.partial(_progress, description="Writing Gaussians")
    colors = {} if suffix == ".splat" else {"rgb": color == "rgb"}
    kept, total = write(checkpoint, output_path, overwrite=overwrite, progress=progress, crop=crop, **colors)
    print(report(output_path, checkpoint, kept, total, crop))


def export_mesh(
    load_config: Path,
    output_path: Path = Path("mesh.ply"),
    max_depth: float | None = None,
    voxel_size: float | None = None,
    truncation: float | None = None,
    resolution: int = 1024,
    parts: int = 50,
    depth: Literal["auto", "median", "expected"] = "auto",
    min_opacity: float = 0.5,
    downscale_factor: float = 1.0,
    overwrite: bool = False,
    step: int | None = None,
    num_devices: int | None = None,
    device_type: Literal["auto", "cpu", "cuda"] = "auto",
    data: Path | None = None,
    save_world_frame: bool = False,
) -> None:
    """Write a mesh of a run's surfaces: depths and colours of the training views, rendered on all GPUs and fused.

    Args:
        load_config: config.yml in the run's folder.
        output_path: The .ply file to write.
        max_depth: Largest depth that is used, in the model's units; by default twice the distance of the nearest view
            from the point that all look at.
        voxel_size: Side of a voxel, in the model's units; by default max-depth / resolution.
        truncation: Distance from a surface up to which the field is defined, in the model's units; by default 5 voxels.
        resolution: Voxels along max-depth, if voxel-size is not given.
        parts: Number of the largest connected parts to keep.
        depth: Surface depth of a pixel: median, where its opacity passes one half, or expected, the mean along its ray.
            auto is median for 2D Gaussians and nerfacto-xl, and expected for others.
        min_opacity: Least opacity of a pixel with a surface.
        downscale_factor: Divisor of the views' size for rendering.
        overwrite: Replace the file if it exists.
        step: Step of the checkpoint; by default the newest.
        num_devices: Number of devices; by default all GPUs, or as many CPU workers as trained the model.
        device_type: Type of the devices; auto takes GPUs if there are any.
        data: Current path of the capture, if it was moved after training.
        save_world_frame: Write the mesh in the capture's own coordinates, not in those of the model. Positions are
            double if float32 cannot hold them (UTM, ECEF). The lengths above are in the model's units in any case.
    """
    from ns_multigpu.plugin.export.world_frame import WorldFrame
    from ns_multigpu.plugin.tools.meshing import Meshing
    from ns_multigpu.plugin.tools.models import run_tool

    work = Meshing(
        output_path, max_depth, voxel_size, truncation, resolution, parts, depth, min_opacity, downscale_factor,
        overwrite, frame=WorldFrame.of_run(load_config) if save_world_frame else None,
    )  # fmt: skip
    run_tool(load_config, step, work, num_devices, device_type, data)


def evaluate(
    load_config: Path,
    output_path: Path = Path("output.json"),
    render_output_path: Path | None = None,
    step: int | None = None,
    num_devices: int | None = None,
    device_type: Literal["auto", "cpu", "cuda"] = "auto",
    data: Path | None = None,
) -> None:
    """Measure a run's model on all held-out views, as ns-eval does, on all GPUs.

    Args:
        load_config: config.yml in the run's folder.
        output_path: The JSON file to write.
        render_output_path: Folder for the rendered images; by default they are not kept.
        step: Step of the checkpoint; by default the newest.
        num_devices: Number of devices; by default all GPUs, or as many CPU workers as trained the model.
        device_type: Type of the devices; auto takes GPUs if there are any.
        data: Current path of the capture, if it was moved after training.
    """
    from ns_multigpu.plugin.tools.models import Evaluation, run_tool

    run_tool(load_config, step, Evaluation(output_path, render_output_path), num_devices, device_type, data)


def render(
    load_config: Path,
    mode: Literal["camera-path", "interpolate", "spiral", "dataset"] = "camera-path",
    camera_path_filename: Path | None = None,
    output_path: Path = Path("renders/output.mp4"),
    rendered_output_names: tuple[str, ...] = (),
    downscale_factor: float = 1.0,
    image_format: Literal["jpeg", "png"] = "jpeg",
    jpeg_quality: int = 100,
    depth_near_plane: float | None = None,
    depth_far_plane: float | None = None,
    colormap: Annotated[Colormap, tyro.conf.arg(name="colormap-options.colormap")] = "default",
    normalize: Annotated[bool, tyro.conf.arg(name="colormap-options.normalize")] = False,
    invert: Annotated[bool, tyro.conf.arg(name="colormap-options.invert")] = False,
    colormap_min: Annotated[float, tyro.conf.arg(name="colormap-options.colormap-min")] = 0.0,
    colormap_max: Annotated[float, tyro.conf.arg(name="colormap-options.colormap-max")] = 1.0,
    render_nearest_camera: bool = False,
    overwrite: bool = False,
    pose_source: Literal["eval", "train"] = "eval",
    interpolation_steps: int = 10,
    order_poses: bool = False,
    frame_rate: int = 24,
    seconds: float = 3.0,
    radius: float = 0.1,
    split: Literal["train", "val", "test", "train+test"] = "test",
    step: int | None = None,
    num_devices: int | None = None,
    device_type: Literal["auto", "cpu", "cuda"] = "auto",
    data: Path | None = None,
) -> None:
    """Render a run's model as ns-render does, on all GPUs. The same command resumes an interrupted render.

    Args:
        load_config: config.yml in the run's folder.
        mode: Cameras along a camera path, between the views of the capture, on a spiral, or the views themselves.
        camera_path_filename: camera-path: the JSON file of the path, from the viewer.
        output_path: The video to write (.mp4); a name without a suffix is a folder for images, as it is with dataset.
        rendered_output_names: Outputs to show side by side: rgb (the default), rgba, depth, accumulation; normals for
            2D Gaussians; rank, each Gaussian in its owner's colour, if the model is sharded. dataset: each in its own
            folder, also gt-rgb, and the prefix raw- for numbers; by default all.
        downscale_factor: Divisor of the cameras' size for rendering.
        image_format: Format of images in a folder.
        jpeg_quality: Quality of JPEG images, 1 to 100.
        depth_near_plane: Depth at the near end of the colour scale; by default each frame's least.
        depth_far_plane: Depth at the far end of the colour scale; by default each frame's largest.
        colormap: Colour map of depth and accumulation.
        normalize: Stretch each frame's values over the full colour scale.
        invert: Reverse the colour map.
        colormap_min: Position of the value 0 in the colour map, 0 to 1.
        colormap_max: Position of the value 1 in the colour map, 0 to 1.
        render_nearest_camera: Show the nearest training photograph next to each frame.
        overwrite: Replace a finished video, or write into a folder that is not empty.
        pose_source: interpolate: split of the views.
        interpolation_steps: interpolate: frames from one view to the next.
        order_poses: interpolate: sort the views by proximity.
        frame_rate: interpolate, spiral: frames per second.
        seconds: spiral: duration.
        radius: spiral: radius of the circle.
        split: dataset: split of the views.
        step: Step of the checkpoint; by default the newest.
        num_devices: Number of devices; by default all GPUs, or as many CPU workers as trained the model.
        device_type: Type of the devices; auto takes GPUs if there are any.
        data: Current path of the capture, if it was moved after training.
    """
    from nerfstudio.utils.colormaps import ColormapOptions

    from ns_multigpu.plugin.tools.frames import Look
    from ns_multigpu.plugin.tools.models import run_tool
    from ns_multigpu.plugin.tools.rendering import FilmRendering
    from ns_multigpu.plugin.tools.shots import CameraPath, Dataset, Interpolated, Spiral

    if mode == "camera-path" and camera_path_filename is None:
        raise ValueError("--mode camera-path: name the path's file, --camera-path-filename. Save one from the viewer.")
    what = {
        "camera-path": CameraPath(camera_path_filename or Path()),
        "interpolate": Interpolated(pose_source, interpolation_steps, order_poses, frame_rate),
        "spiral": Spiral(seconds, frame_rate, radius),
        "dataset": Dataset(split),
    }[mode]
    names = rendered_output_names or (() if mode == "dataset" else ("rgb",))
    colors = ColormapOptions(colormap, normalize, colormap_min, colormap_max, invert)
    look = Look(names, depth_near_plane, depth_far_plane, colors)
    work = FilmRendering(
        what, output_path, look, downscale_factor, image_format, jpeg_quality, render_nearest_camera, overwrite
    )
    run_tool(load_config, step, work, num_devices, device_type, data)


def _progress(done: Iterable[int], total: int, description: str = "Rendering views") -> Iterable[int]:
    from rich.progress import track

    return track(done, description=description, total=total)


COMMANDS: dict[str, Callable[..., None]] = {
    "city": city,
    "plan": plan,
    "export": export,
    "export-mesh": export_mesh,
    "eval": evaluate,
    "render": render,
}
"""Subcommands by name."""


_OLD_OUTPUT = re.compile(r"--(?:output|out)(?==|$)")


def with_present_names(words: Sequence[str]) -> list[str]:
    """Return a command line with `--output-path` for its old names `--output` and `--out`, which a note names."""
    present = [_OLD_OUTPUT.sub("--output-path", word) for word in words]
    if old := [word.partition("=")[0] for word, now in zip(words, present, strict=True) if word != now]:
        print(f"ns-multigpu: note: {old[0]} is now called --output-path.", file=sys.stderr)
    return present


def docs_folder() -> Path:
    """Return the folder of the pages that messages name: of the installed package, or of the repository."""
    package = Path(__file__).parent
    return next(path for path in (package / "docs", package.parent / "docs") if path.is_dir())


def main(args: Sequence[str] | None = None) -> None:
    """Run a subcommand. Invalid input prints a one-line error and exits with code 1."""
    words = with_present_names(sys.argv[1:] if args is None else args)
    try:
        tyro.extras.subcommand_cli_from_dict(
            COMMANDS, prog="ns-multigpu", description=f"Tools of ns_multigpu. Pages: {docs_folder()}", args=words
        )
    except (ValueError, OSError, RuntimeError) as error:
        print(f"ns-multigpu: error: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
