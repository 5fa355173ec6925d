"""What nerfstudio does while it is imported that no command needs to wait for; and Python, as it ends.

nerfstudio 1.1.5 knows methods that it does not ship, and lists them. For each it asks `inspect.stack()` which function
makes the entry. That reads the source lines of every caller and goes through all loaded modules: 5 s of every command's
start where cores are slow. The name of one caller is all that is wanted.

Its splatfacto has torch compile a small function. That loads a compiler, 2 to 3 s there, which our methods never call.
It is loaded in the first call of that function, here; see `lazy_compiler` for who else loads it.
"""

import atexit
import functools
import gc
import sys
from collections.abc import Callable
from typing import Any

from nerfstudio.configs import external_methods
from nerfstudio.utils import misc

from ns_multigpu.plugin.launch import lazy_compiler

_Entry: Any = external_methods.ExternalMethodDummyTrainerConfig
_ask_to_install, _compile_now = _Entry.__post_init__, misc.torch_compile
_LIST = external_methods.get_external_methods.__name__


def hasten() -> None:
    """From now on this process imports nerfstudio as described above.

    To be called before nerfstudio imports its methods: `ns_multigpu.dataparsers` is.
    """
    _Entry.__post_init__, misc.torch_compile = _post_init, _compile_later
    lazy_compiler.load_later()


def end_quickly() -> None:
    """From now on this process ends without a search for objects that refer to each other in a circle.

    As it ends Python takes all modules apart, and goes through all objects again and again. There are a million of
    torch's and nerfstudio's: that takes half a second, 2 s on slow cores. All else happens as ever: exit status,
    `atexit`, threads, and the end of each object that nothing refers to. Circles are left to the system, as in a
    worker, which ends without any of this.
    """
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)


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
