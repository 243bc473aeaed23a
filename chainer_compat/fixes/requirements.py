"""The part of ``pkg_resources`` that chainer.testing uses, implemented with importlib.metadata.

It checks whether a suitable version of a distribution is installed.
"""

import re
from importlib import metadata
from itertools import takewhile


class ResolutionError(Exception):
    """A requirement is not satisfied."""


class DistributionNotFound(ResolutionError):
    """The distribution is not installed."""


class VersionConflict(ResolutionError):
    """The installed version of the distribution does not match."""


class WorkingSet:
    """The installed distributions."""

    def require(self, *requirements: str) -> None:
        """Raise ResolutionError unless all ``requirements``, such as numpy>=1.10,<2, are met."""
        for requirement in requirements:
            name, *clauses = re.split(r'\s*(?:,|(?=[<>=!~]=|[<>]))\s*', requirement.strip())
            try:
                installed = metadata.version(name)
            except metadata.PackageNotFoundError as e:
                raise DistributionNotFound(requirement) from e
            if not all(_matches(installed, clause) for clause in clauses if clause):
                raise VersionConflict(f'{requirement}: {installed} is installed')


def _matches(installed: str, clause: str) -> bool:
    match = re.fullmatch(r'(==|!=|<=|>=|<|>)\s*(\d\S*)', clause)
    if match is None:
        raise ValueError(f'Cannot parse the version clause {clause!r}; use, e.g., >=1.10 or <2.')
    relation, wanted = match.groups()
    a, b = _key(installed), _key(wanted)
    return {
        '==': a == b,
        '!=': a != b,
        '<=': a <= b,
        '>=': a >= b,
        '<': a < b,
        '>': a > b,
    }[relation]


def _key(version: str) -> tuple[tuple[int, ...], int, int]:
    """Return the sort key of a version: 2.0rc1 < 2.0 == 2 < 2.0.post3 < 2.1."""
    words = re.findall(r'\d+|[a-z]+', version.lower().split('+')[0])
    release = [int(word) for word in takewhile(str.isdigit, words)]
    rest = words[len(release) :]
    while release and release[-1] == 0:
        release.pop()
    stage = {'dev': -4, 'a': -3, 'alpha': -3, 'b': -2, 'beta': -2, 'rc': -1, 'c': -1, 'post': 1}
    number = next((int(word) for word in rest if word.isdigit()), 0)
    return tuple(release), stage.get(rest[0], 0) if rest else 0, number
