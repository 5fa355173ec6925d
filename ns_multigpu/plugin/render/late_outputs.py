"""Model outputs, one of which is computed on first access.

Nerfstudio's viewer and renderers list all output names and read only the selected ones. So a name can be listed before
its image exists.
"""

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any


class LateOutputs(MutableMapping[str, Any]):
    """Outputs by name, as a mapping for nerfstudio.

    Args:
        ready: computed outputs; outputs that are set later are added.
        name: the output that is computed on first access. It is listed second to last. Of a new list, nerfstudio's
            viewer selects the first output, and the last for its split screen.
        make: computes it; called once, on first access.
        listed: True to list the name; if False it can still be read.
    """

    def __init__(self, ready: dict[str, Any], name: str, make: Callable[[], Any], *, listed: bool = True) -> None:
        self._ready, self._name, self._make = ready, name, make
        names = list(ready)
        self._names = [*names[:-1], name, *names[-1:]] if listed else names

    def __getitem__(self, name: str) -> Any:
        if name == self._name and name not in self._ready:
            self._ready[name] = self._make()
        return self._ready[name]

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in self._names:
            self._names.append(name)
        self._ready[name] = value

    def __delitem__(self, name: str) -> None:
        self._names.remove(name)
        self._ready.pop(name, None)

    def __contains__(self, name: object) -> bool:
        return name in self._names or name == self._name

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __repr__(self) -> str:
        return ", ".join(self._names)

    def __len__(self) -> int:
        return len(self._names)
