"""Imported first by a server that Python starts itself: it ends with the process that has started it."""

import os

from ns_multigpu.plugin.launch.worker_server import BY_NVML, die_with

die_with(os.getppid())
os.environ[BY_NVML] = "1"
