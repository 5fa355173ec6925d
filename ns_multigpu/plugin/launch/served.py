"""Imported by the server that forks workers, before all else: it ends with the process that has started it."""

import os

from ns_multigpu.plugin.launch.worker_server import die_with

die_with(os.getppid())
