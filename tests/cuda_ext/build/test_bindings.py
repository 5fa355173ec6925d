"""The CUDA bindings read the operators' one schema by name: every name is in it, and every argument is read."""

import re
from functools import lru_cache

import pytest
import torch

from cuda_ext.build.cuda import BINDING
from cuda_ext.dispatch import cuda as _cuda
from cuda_ext.dispatch.schema import SCHEMAS

_BOUND = re.compile(r'm\.impl\("(\w+)",\s*bound<(.+?)>\(\)\);', re.S)
_FUNCTION = re.compile(r"^(?! )(?:struct (\w+) \{|[\w:<>*&, ]+?[ *&](\w+)\()", re.M)
_READ = re.compile(r'call\.(?!read)\w+(?:<\w+>)?\("(\w+)"|\(call, (?:[\w.]+, )?"(\w+)"')
_ITEMS = re.compile(r'(?:constexpr char (\w+)\[\] =|call\.read<[^()]+>\((?:\w+ \?)?)\s*((?:"[^"]*"(?: :)?\s*)+)')
_NAMED = re.compile(r"(?:^|\s)#?([A-Z]?[a-z]\w*)")
UNREAD = {
    "project_backward": {"conics"},  # recomputed with the rest of the footprint
    "rasterize": {"absgrad_probe"},  # for autograd alone
}
"""Arguments that a binding has no use for."""
EITHER = {
    "splat_forward": {"last", "table", "steps", "exp_avgs", "exp_avg_sqs"},
    "keep_rows": {"first", "end"},
    "project_axes_backward": {"point_ids"},
}
"""Names that a binding's helpers read for other operators only."""


@lru_cache
def bindings() -> dict[str, str]:
    """File name -> source of each file of bindings that goes by names."""
    found = [path for path in _cuda.library(("90",)).sources if path.stem.endswith(BINDING)]
    return {path.name: path.read_text("utf8") for path in found}


def functions(text: str) -> dict[str, str]:
    """Name -> body of a file's functions and structs, which end with a brace at the beginning of a line."""
    found: dict[str, str] = {}
    for match in _FUNCTION.finditer(text):
        line = text[match.start() : text.index("\n", match.start())]
        body = line if line.endswith("}") else text[match.start() : text.index("\n}", match.start())]
        found[match[1] or match[2]] = body
    return found


def specifications(text: str) -> dict[str, set[str]]:
    """Name -> arguments of each specification of the file (`call.h`); those of calls have the name ""."""
    return {name: set(_NAMED.findall(" ".join(re.findall('"([^"]*)"', items)))) for name, items in _ITEMS.findall(text)}


def names_read(text: str, root: str) -> set[str]:
    """Return the arguments that a binding reads: by its specifications, itself or through the file's helpers."""
    bodies, items, seen, names = functions(text), specifications(text), set[str](), set[str]()
    waiting = [root]
    while waiting:
        body = waiting.pop()
        if body in seen:
            continue
        seen.add(body)
        names |= {one or other for one, other in _READ.findall(body)}
        names |= {name for _, found in _ITEMS.findall(body) for name in _NAMED.findall(found.replace('"', " "))}
        names |= {name for one, found in items.items() if one and re.search(rf"\b{one}\b", body) for name in found}
        call = r"(?:<\w+(?: \w+)?>)?(?: \w+)?\(call\b" if body != root else r"\b"
        waiting += [bodies[other] for other in bodies if re.search(rf"\b{other}{call}", body)]
    return names


def bound() -> list[tuple[str, str, str]]:
    """Operator, file and function of every binding that goes by names."""
    return [(name, file, body) for file, text in bindings().items() for name, body in _BOUND.findall(text) if body]


def test_each_schema_operator_is_bound_once() -> None:
    """By literal names; that all operators are bound, loading the library shows (`test_build_cuda`)."""
    names = [name for text in bindings().values() for name, _ in _BOUND.findall(text)]
    assert len(names) > 60 and len(names) == len(set(names))
    assert set(names) <= {schema.split("(")[0] for schema in SCHEMAS}


@pytest.mark.parametrize(("operator", "file", "function"), bound())
def test_a_binding_reads_what_its_schema_has(operator: str, file: str, function: str) -> None:
    schema = getattr(torch.ops.ns_multigpu, operator).default._schema
    arguments = {argument.name for argument in schema.arguments}
    read = names_read(bindings()[file], function) - EITHER.get(operator, set())
    assert read - arguments == set(), "no such argument"
    assert arguments - read == UNREAD.get(operator, set()), "never read"
