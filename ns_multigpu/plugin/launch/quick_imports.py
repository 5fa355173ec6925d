"""What nerfstudio does while it is imported that no command needs to wait for; and Python, as it ends.

nerfstudio 1.1.5 knows methods that it does not ship, and lists them. For each it asks `inspect.stack()` which function
makes the entry. That reads the source lines of every caller and goes through all loaded modules: 5 s of every command's
start where cores are slow. The name of one caller is all that is wanted.

Its splatfacto has torch compile a small function. That loads a compiler, 2 to 3 s there, which our methods never call.
It is loaded in the first call of that function, here; see `lazy_compiler` for who else loads it.

It imports three packages for what a run seldom does: tensorly for grids of another rank than are ever made, scipy's
interpolation for the viewer's camera paths, torchvision to write a picture. They are a sixth of all modules.

And Python looks for circles of objects again and again while hundreds of thousands are made that stay: a fifth of the
time.
"""

import atexit
import functools
import gc
import importlib
import sys
import threading
from collections.abc import Callable
from typing import Any

from nerfstudio.configs import external_methods
from nerfstudio.utils import misc

from ns_multigpu.plugin.launch import lazy_compiler
from ns_multigpu.plugin.launch.stand_ins import StandIn, real, stand_in_for, stands_in
from ns_multigpu.plugin.launch.worker_server import trains

_TENSORS, _CURVES, _PICTURES = "tensorly", "scipy.interpolate", "torchvision"

_LATER = ("scipy.spatial", "ns_multigpu.plugin.checkpoint.saved_tensors")
"""For the distances between seed points; for checkpoints."""

_Entry: Any = external_methods.ExternalMethodDummyTrainerConfig
_ask_to_install, _compile_now = _Entry.__post_init__, misc.torch_compile
_LIST = external_methods.get_external_methods.__name__


def hasten() -> None:
    """From now on this process imports nerfstudio as described above.

    To be called before nerfstudio imports its methods: `ns_multigpu.dataparsers` is.
    """
    _Entry.__post_init__, misc.torch_compile = _post_init, _compile_later
    lazy_compiler.load_later()
    _load_later()
    if trains(sys.argv):
        gc.disable()


def collect_again() -> None:
    """What a run's process imports, it has imported: it looks for circles again, but not among all these objects."""
    gc.freeze()
    gc.enable()


def load_beside() -> None:
    """Has a thread load what a run needs later, while this one waits for devices and for other ranks."""
    threading.Thread(target=_load, name="imports", daemon=True).start()


def end_quickly() -> None:
    """From now on this process ends without a search for objects that refer to each other in a circle.

    As it ends Python takes all modules apart, and goes through all objects again and again. There are a million of
    torch's and nerfstudio's: that takes half a second, 2 s on slow cores. All else happens as ever: exit status,
    `atexit`, threads, and the end of each object that nothing refers to. Circles are left to the system, as in a
    worker, which ends without any of this.
    """
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)


def _load() -> None:
    for name in _LATER:
        importlib.import_module(name)


def _load_later() -> None:
    """Puts stand-ins in the places of what a run seldom needs."""
    backends: list[str] = []

    def set_backend(name: str, *args: Any, **options: Any) -> None:
        if stands_in(_TENSORS):
            backends.append(name)
        else:
            real(_TENSORS).set_backend(name, *args, **options)

    def loaded(tensors: Any) -> None:
        for name in backends:
            tensors.set_backend(name)

    stand_in_for(StandIn(_TENSORS, package=True, loaded=loaded, set_backend=set_backend))
    stand_in_for(StandIn(_CURVES, package=True))
    utils = StandIn(f"{_PICTURES}.utils", together=[_PICTURES])
    stand_in_for(StandIn(_PICTURES, package=True, together=[utils.__name__], utils=utils), utils)


def _post_init(self: Any) -> None:
    """See nerfstudio's `__post_init__`: an entry that is not made for the list was chosen by the user."""
    if sys._getframe(2).f_code.co_name != _LIST:  # this function's caller is the dataclass's `__init__`
        _ask_to_install(self)


def _compile_later(*args: Any, **kwargs: Any) -> Any:
    """See nerfstudio's `torch_compile`; as a decorator, it compiles when the function is first called."""
    if args:
        return _compile_now(*args, **kwargs)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        compiled = functools.cache(lambda: _compile_now(**kwargs)(function))
        return functools.wraps(function)(lambda *given, **named: compiled()(*given, **named))

    return decorate
