"""Host memory that is available to this process."""

from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def available_memory(proc: Path = Path("/proc"), cgroup: Path = _CGROUP) -> int | None:
    """Return the bytes available without evicting other data, within the container's limit; None if unknown.

    Args:
        proc: Linux's folder with `meminfo`.
        cgroup: folder with a container's limit, version 2 or 1.
    """
    bounds = [_field(proc / "meminfo", "MemAvailable")]
    for limit, used, stat, cached in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
    ):
        most, taken = _number(cgroup / limit), _number(cgroup / used)
        if most is not None and taken is not None:
            # Cached file pages count as used, although the kernel frees unused ones on demand.
            bounds.append(max(0, most - taken + (_field(cgroup / stat, cached) or 0)))
    known = [bound for bound in bounds if bound is not None]
    return min(known) if known else None


def _field(path: Path, name: str) -> int | None:
    """Return the number in a line `name[:] number [kB]` of a file, in bytes; None without such a line."""
    try:
        lines = path.read_text("utf8").splitlines()
    except OSError:
        return None
    for line in lines:
        words = line.replace(":", " ").split()
        if words and words[0] == name:
            return int(words[1]) << (10 if words[-1] == "kB" else 0)
    return None


def _number(path: Path) -> int | None:
    try:
        text = path.read_text("utf8").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
