"""Build backend: setuptools, with an editable install that needs no import hook of setuptools'.

An editable install of ChainerMN is the same wheel as any other, without the packages and
with the repository root in its ``.pth`` file; setup.py does both when it sees the variable.
"""

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
    """Builds the wheel that ``pip install -e .`` installs; returns its file name."""
    os.environ['CHAINERMN_BUILD_EDITABLE'] = '1'
    try:
        return build_wheel(wheel_directory, config_settings, metadata_directory)
    finally:  # the same process may build a wheel next
        del os.environ['CHAINERMN_BUILD_EDITABLE']
