"""nerfstudio's list of methods that could be installed, made without a walk through the call stack for each.

nerfstudio 1.1.5 asks `inspect.stack()`, for each of the methods that it knows but does not ship, which function makes
its entry. That reads the source lines of every caller and goes through all loaded modules: 1 s of every command's
start on a fast machine, 5 s on a slow one. The name of one caller is all that is wanted.
"""

import sys
from typing import Any

from nerfstudio.configs import external_methods as stock

_Entry: Any = stock.ExternalMethodDummyTrainerConfig
_ask_to_install = _Entry.__post_init__
_LIST = stock.get_external_methods.__name__


def hasten() -> None:
    """From now on this process's list is made as described above. To be called before nerfstudio makes it."""
    _Entry.__post_init__ = _post_init


def _post_init(self: Any) -> None:
    """See nerfstudio's `__post_init__`: an entry that is not made for the list was chosen by the user."""
    if sys._getframe(2).f_code.co_name != _LIST:  # this function's caller is the dataclass's `__init__`
        _ask_to_install(self)
