"""Build backend: setuptools, with editable installs that do not use setuptools' import hook.

An editable install of ChainerMN is a wheel without packages, with the repository root in its
``.pth`` file. The environment variable set here selects this in setup.py.
"""

# Older Pythons also run this file, before pip says which Python is required.
from __future__ import annotations

import os
from typing import Any

from setuptools.build_meta import (
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    'build_editable',
    'build_sdist',
    'build_wheel',
    'get_requires_for_build_editable',
    'get_requires_for_build_sdist',
    'get_requires_for_build_wheel',
    'prepare_metadata_for_build_editable',
    'prepare_metadata_for_build_wheel',
]

get_requires_for_build_editable = get_requires_for_build_wheel
prepare_metadata_for_build_editable = prepare_metadata_for_build_wheel


def build_editable(
    wheel_directory: str,
    config_settings: Any = None,
    metadata_directory: str | None = None,
) -> str:
    """Build the wheel for ``pip install -e .``; return its file name."""
    os.environ['CHAINERMN_BUILD_EDITABLE'] = '1'
    try:
        return build_wheel(wheel_directory, config_settings, metadata_directory)
    finally:  # the same process may build a wheel next
        del os.environ['CHAINERMN_BUILD_EDITABLE']
