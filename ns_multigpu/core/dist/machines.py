"""Machine of each rank. Machines are numbered and have equally many, consecutive ranks."""

from collections.abc import Sequence
from dataclasses import dataclass

PRETEND_MACHINES = "NS_MULTIGPU_MACHINES"


@dataclass(frozen=True)
class Place:
    """Machine of a rank, from its launcher and environment.

    Attributes:
        group: identifies its machine: GROUP_RANK, which torchrun sets.
        host: the machine's name.
        pretended: how many machines this one is to pass for; 1 for itself alone.
    """

    group: int
    host: str
    pretended: int = 1


@dataclass(frozen=True)
class Layout:
    """Mapping of ranks to machines: rank r is on machine `r // per_machine`.

    Attributes:
        per_machine: ranks of each.
        hosts: the machines' names, by number.
        pretended: how many of them are one machine in truth; 1 if each is one.
    """

    per_machine: int
    hosts: tuple[str, ...]
    pretended: int = 1


def layout_of(places: Sequence[Place]) -> Layout:
    """Return the mapping of ranks to machines, which are numbered in the order of their ranks.

    Args:
        places: by rank, at least one.

    Raises:
        ValueError: machines have unequally many ranks, or ranks that do not follow one another; or the number of
            machines to pretend fits neither the ranks nor the other ranks' number.
    """
    ranks: dict[int, list[int]] = {}
    for rank, place in enumerate(places):
        ranks.setdefault(place.group, []).append(rank)
    names = [f"machine {number} ({places[own[0]].host})" for number, own in enumerate(ranks.values())]
    lengths = [len(own) for own in ranks.values()]
    if len(set(lengths)) > 1:
        listed = ", ".join(f"{name} has {length}" for name, length in zip(names, lengths, strict=True))
        raise ValueError(
            f"Every machine must have equally many ranks, and {listed}. Give torchrun the same --nproc-per-node on all "
            f"of them; {min(lengths)} is what each has."
        )
    if any(own != list(range(own[0], own[0] + len(own))) for own in ranks.values()):
        listed = ", ".join(f"{name} has {_listed(own)}" for name, own in zip(names, ranks.values(), strict=True))
        raise ValueError(
            f"The ranks of a machine must follow one another, and {listed}. Number them machine by machine, as "
            "torchrun does."
        )
    pretended_counts = {place.pretended for place in places}
    if len(pretended_counts) > 1:
        listed = ", ".join(f"{place.pretended} on rank {rank}" for rank, place in enumerate(places))
        raise ValueError(f"{PRETEND_MACHINES} must be the same for all ranks, and is {listed} (1: not set).")
    hosts = tuple(places[own[0]].host for own in ranks.values())
    pretended = pretended_counts.pop()
    if pretended == 1:
        return Layout(lengths[0], hosts)
    if len(ranks) > 1:
        raise ValueError(
            f"{PRETEND_MACHINES}={pretended} makes one machine pass for several, and this job has {len(ranks)}. "
            "Unset it."
        )
    if len(places) % pretended:
        raise ValueError(
            f"{PRETEND_MACHINES}={pretended}: {len(places)} rank{'' if len(places) == 1 else 's'} cannot be distributed "
            f"to {pretended} machines equally. Start {-(-len(places) // pretended) * pretended} ranks, or set it to a "
            f"divisor of {len(places)}."
        )
    return Layout(len(places) // pretended, hosts * pretended, pretended)


def _listed(ranks: Sequence[int]) -> str:
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"
