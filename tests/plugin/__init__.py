"""Tests of what uses nerfstudio."""

import nerfstudio.configs.base_config  # nerfstudio.utils.writer cannot be imported before it  # noqa: F401
