"""The tables of `benchmarks.tile`."""

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.scaling.tile_run import LINK_GB_PER_S, PARTS

Result = dict[str, Any]
COUNTING = ", counting"
"""In the name of a way whose steps count for densification."""


def show(console: Console, results: list[Result]) -> None:
    """Print the most important figures, in at most 60 lines for six scenes on 1, 2 and 4 GPUs."""
    every = [r for r in results if "ms" in r]
    timed = [r for r in every if not r.get("counts")]
    names = list(dict.fromkeys(r["name"] for r in every))
    worlds = sorted({r["gpus"] for r in every if r["kind"] == "tile"})
    console.print(_overview(every, names, worlds))
    console.print(_parts(timed, names))
    variants = list(
        dict.fromkeys(r["way"] for r in timed if r["kind"] == "tile" and r["batch"] == 1 and not r["usual"])
    )
    if variants:
        console.print(_modes(timed, names, variants))
    missing = [r for r in results if "ms" not in r]
    for r in missing[:4]:
        reason = (r.get("error") or r.get("skipped") or "").strip().splitlines()[-1:]
        line = f"{r['gpus']} x {r['name']} {r['way']}: {' '.join(reason)}"
        console.print(line[:170], markup=False, highlight=False)
    if len(missing) > 4:
        console.print(f"... and {len(missing) - 4} more without figures; see the JSON.")


def _table(title: str, *heads: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0))
    for k, head in enumerate(heads):
        table.add_column(head, justify="right" if k else "left")
    return table


def _find(timed: list[Result], **wanted: Any) -> Result | None:
    return next((r for r in reversed(timed) if all(r.get(k) == v for k, v in wanted.items())), None)


def _overview(every: list[Result], names: list[str], worlds: list[int]) -> Table:
    """Return a table with a row for each scene, and one for its counting steps if they were measured."""
    plain = [r for r in every if not r.get("counts")]
    counting = [{**r, "way": r["way"].removesuffix(COUNTING)} for r in every if r.get("counts")]
    heads = ["scene", "single", *(f"tile x{n}" for n in worlds)]
    heads += ["single img/s", *(f"batch x{n} img/s" for n in worlds if n > 1), "gsplat", "fused Adam"]
    heads += [f"gsplat x{n} img/s" for n in worlds if n > 1]
    table = _table("whole step, ms, a view a step (times faster than single); images a second, a view a GPU", *heads)
    for name, timed, more in [(n, of, more) for n in names for of, more in ((plain, ""), (counting, COUNTING))]:
        if more and not any(r["name"] == name for r in timed):
            continue
        single = _find(timed, name=name, way="single")
        cells = [name + more, _ms(single)]
        for n in worlds:
            tile = _find(timed, name=name, kind="tile", gpus=n, batch=1, usual=True)
            cells.append(_ms(tile) + (f" ({single['ms'] / tile['ms']:.2f})" if single and tile else ""))
        cells.append(f"{single['images_per_s']:.0f}" if single else "")
        for n in [n for n in worlds if n > 1]:
            batch = _find(timed, name=name, kind="tile", gpus=n, batch=n, usual=True)
            cells.append(_rate(batch, single))
        for way in ("gsplat", "gsplat, fused Adam"):
            cells.append(_ms(_find(timed, name=name, way=way, gpus=1)))
        for n in [n for n in worlds if n > 1]:
            both = [_find(timed, name=name, kind="gsplat", way=way, gpus=n) for way in ("gsplat, fused Adam", "gsplat")]
            one = _find(timed, name=name, way="gsplat, fused Adam", gpus=1)
            cells.append(_rate(both[0] or both[1], one))
        table.add_row(*cells)
    return table


def _parts(timed: list[Result], names: list[str]) -> Table:
    title = f"parts of a tile step, ms (slowest rank); sent by the busiest GPU, share of {LINK_GB_PER_S:.0f} GB/s"
    heads = ("scene", *PARTS, "host", "flush", "MB sent", "of link", "equal rows", "planned", "with halo")
    table = _table(f"{title}; most work / mean", *heads)
    for name in names:
        for r in timed:
            if r["name"] != name or r["kind"] != "tile" or r["batch"] != 1 or not r["usual"]:
                continue
            parts, balance = r["parts"], r["balance"]
            table.add_row(
                f"{name} x{r['gpus']}",
                *(f"{parts['slowest_ms'][part]:.3f}" for part in PARTS),
                f"{r['host_ms']:.3f}",
                f"{r['flush_ms']:.2f}",
                f"{max(r['exchange']['bytes_sent']) / 1e6:.1f}",
                f"{100 * parts['link_gb_per_s'] / LINK_GB_PER_S:.0f} %",
                *(f"{balance[key]:.2f}" for key in ("equal_rows", "planned", "with_halo")),
            )
    return table


def _modes(timed: list[Result], names: list[str], variants: list[str]) -> Table:
    table = _table("other ways, ms, a view a step", "scene", "usual", *(way.removeprefix("tile, ") for way in variants))
    for name in names:
        for n in sorted({r["gpus"] for r in timed if r["way"] in variants}):
            found = [_find(timed, name=name, way=way, gpus=n, batch=1) for way in variants]
            usual = _find(timed, name=name, kind="tile", gpus=n, batch=1, usual=True)
            if any(found):
                table.add_row(f"{name} x{n}", _ms(usual), *(_ms(one) for one in found))
    return table


def _ms(result: Result | None) -> str:
    return f"{result['ms']:.2f}" if result else ""


def _rate(result: Result | None, base: Result | None) -> str:
    if result is None:
        return ""
    rate = result["images_per_s"]
    return f"{rate:.0f}" + (f" ({rate / base['images_per_s']:.2f})" if base else "")
