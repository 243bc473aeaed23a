"""The build of PyTorch that pip would install. PyPI's build for Linux includes CUDA: gigabytes."""

import json
import pathlib
import re
import subprocess
import sys

TOX = pathlib.Path(__file__).parent.parent / 'tox.ini'


def why_not() -> str:
    """Return why pip would not install a build for CPUs, or ''."""
    torch, = set(re.findall(r'^ *(torch==.*)$', TOX.read_text(), re.MULTILINE))
    pip = subprocess.run(
        [sys.executable, '-m', 'pip', 'install', '--dry-run', '--ignore-installed', '--no-deps',
         '--quiet', '--report', '-', torch], capture_output=True, text=True, check=False)
    if pip.returncode != 0:
        return f'pip finds no {torch}'
    package, = json.loads(pip.stdout)['install']
    version = package['metadata']['version']
    return '' if version.endswith('+cpu') else f'{torch} for CPUs: pip would install {version}'
