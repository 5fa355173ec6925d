"""Faster start of nerfstudio's viewer.

viser 0.2.7 searches an archive of 4,290 icons for each of the 16 that nerfstudio shows: 1.3 s. nerfstudio 1.1.5 then
reads every training image again for thumbnails: 20 ms each, 6 s for 300 views. Here the archive is read once, and
thumbnails appear one by one while the run continues.
"""

import functools
import tarfile
import threading
from collections.abc import Iterator
from typing import Any

from nerfstudio.utils.rich_utils import CONSOLE
from nerfstudio.viewer import viewer as stock
from rich.markup import escape
from viser import _gui_api, _gui_handles, _icons  # pyright: ignore[reportAttributeAccessIssue]

_stock_init_scene = stock.Viewer.init_scene


def hasten() -> None:
    """Install the faster start for this process's viewers."""
    for module in (_icons, _gui_api, _gui_handles):
        module.svg_from_icon = icon  # type: ignore[attr-defined]
    viewer: Any = stock.Viewer
    viewer.init_scene = _init_scene
    viewer.camera_handles = property(lambda self: self._pictures, _keep_pictures)


@functools.cache
def _archive() -> dict[str, str]:
    """Return the archive's icons as text, by file name: 2 MB."""
    path = _icons.ICONS_DIR / "tabler-icons.tar"
    with tarfile.open(path, "r:") as tar:
        members = tar.getmembers()
    # Not by `extractfile`: its objects lose an exception raised during their creation or release, such as Ctrl-C.
    data = path.read_bytes()
    ends = {member.name: (member.offset_data, member.offset_data + member.size) for member in members}
    return {name: data[begin:end].decode("utf-8") for name, (begin, end) in ends.items() if begin < end}


def icon(icon_name: str) -> str:
    """Replace viser's `svg_from_icon`."""
    return _archive()[f"{icon_name}.svg"]


class _Pictures(dict[int, Any]):
    """Thumbnails by view. An iteration covers those that existed when it began.

    The first view's is hidden: pages open at its camera, where it would cover the image.
    """

    def __setitem__(self, view: int, picture: Any) -> None:
        super().__setitem__(view, picture)
        if view == 0:
            picture.visible = False

    def __iter__(self) -> Iterator[int]:
        return iter(list(self.keys()))


def _keep_pictures(self: Any, pictures: dict[int, Any]) -> None:
    self._pictures = _Pictures(pictures)


def _init_scene(self: Any, train_dataset: Any, train_state: Any, eval_dataset: Any = None) -> None:
    """Replace nerfstudio's `init_scene`; return at once."""
    self.camera_handles, self.original_c2w = {}, {}
    self.train_state, self.train_util = train_state, 0.9

    def draw() -> None:
        try:
            _stock_init_scene(self, train_dataset, train_state, eval_dataset)
        except Exception as error:  # the page works without thumbnails, and training continues
            text = f"The viewer could not show all training images ({type(error).__name__}: {error})."
            CONSOLE.print(f"[bold yellow]{escape(text)}[/bold yellow]")

    threading.Thread(target=draw, name="pictures for the viewer").start()
