"""A model's outputs, one of which is only computed when somebody looks at it.

Nerfstudio's viewer lists the names of all outputs that it is given and then takes the one that was chosen; its
renderers do the same. So a name can be there without its image.
"""

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any


class LateOutputs(MutableMapping[str, Any]):
    """Outputs by name, as nerfstudio handles them.

    Args:
        ready: the outputs that are there; what is set later is put there.
        name: of the one that is not. It stands before the last of the others, for of a new list of outputs nerfstudio's
            viewer chooses the first, and the last for its split screen.
        make: computes it; called once, when it is looked at first.
        listed: whether it is among the names that are listed; if not it is there for who asks for it.
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
