"""The native operators, made ready before workers start."""

from typing import Literal

import cuda_ext
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.launch import checks


def prepare_operators(device_type: Literal["cpu", "cuda", "mps"]) -> None:
    """Builds the native operators here, once and in sight, before several workers ask for them at the same time."""
    checks.check_operators(device_type, cuda_ext.compiler_problem(device_type))
    if cuda_ext.backend(device_type) == "native":
        try:
            cuda_ext.build_native(device_type)
        except cuda_ext.NativeBuildError as error:
            raise InputError(str(error)) from error
