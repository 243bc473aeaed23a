"""Code and pages use the field's terms: private words of earlier versions do not come back.

``refuse`` is a public name and stays; pages name ``CHAINERMN_AGREE``, which is ignored.
"""

import pathlib
import re

import pytest
from PIL import Image

pytestmark = pytest.mark.mpi_skip

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = ('chainermn/', 'chainer_compat/', 'benchmarks/', 'examples/', 'docs/')
FILES = sorted(
    path for pattern in (
        '*.md', '*.py', '*.toml', '*.ini', '*.cff', 'deploy/*', 'docs/**/*.md', 'docs/**/*.rst',
        'docs/**/*.py', 'docs/**/*.svg', 'docs/**/*.png', 'chainermn/**/*.py',
        'chainer_compat/**/*.py', 'benchmarks/**/*.py', 'examples/**/*.md', 'examples/**/*.py',
        'examples/**/*.ipynb', 'tests/**/*.py')
    for path in ROOT.glob(pattern)
    if path.is_file() and path != pathlib.Path(__file__) and '_build' not in path.parts)

#: Words of sentences and identifiers, as regular expressions, with the terms to use.
RETIRED = {
    'verbs?': 'operation, collective',
    'agreed|(?:dis)?agreements?|disagree(?:s|d)?': 'consistency check, mismatch, checked',
    'refusals?': 'error on all ranks',
    'witness(?:es|ed)?': 'node monitor',
    'attend(?:s|ed|ance)?': 'register',
    'goodbyes?': 'deregister, finished',
    'patient(?:ly)?': 'timeout, grace period, passive wait',
    'recent calls': 'flight recorder',
    'on the wire|wire format': 'buffer, encoded',
    'few_pieces|many_pieces': 'direct chunk, packed chunk',
    'alike': 'homogeneous, equal',
    'twins?': 'background communicator',
    'travell?ing': 'in flight',
    'can hide': 'is profitable',
    'naps?': 'poll interval',
    'hurry|hurries': 'urgent',
    'keepers?': 'supervisor',
    'parcels?': 'serialization',
    'durabl[ey]': 'atomic',
    'superfluous': 'obsolete',
    'mend(?:s|ed|ing)?': 'patch',
    "today's": 'current',
    'for ever': 'forever',
    'comes? to (?:its|an|the|their) end': 'finished',
    'gets? on(?=[.,;:])|gets on with': 'makes progress',
    'sees? to it': 'ensures',
    'as ever|and the like': 'as always, similar',
    'behaviour|colours?|neighbours?': 'American spelling',
}
#: Words that are common elsewhere, retired in the package and its pages.
RETIRED_IN_PACKAGE = {
    'travel(?:s|ed)?': 'are sent',
    'said': 'responses, remote error',
    'facts?': 'environment',
    'trials?': 'smoke test, short run',
    'houses?': 'architecture',
    '(?:a|each|every|the) (?:floor|room)': 'layer, module',
}


def read(path):
    """Return the text of a file; pictures of benchmarks describe their words."""
    if path.suffix == '.png':
        return Image.open(path).text['Description']
    return path.read_text(encoding='utf-8')


def pattern_of(words):
    alternatives = '|'.join(words).replace(' ', r'[\s_]+')
    return re.compile(rf'(?<![A-Za-z])(?:{alternatives})(?![a-z])')


def retired_words(text, is_package=True):
    """The retired words in a text, with their line numbers; words in capitals are constants."""
    words = RETIRED | RETIRED_IN_PACKAGE if is_package else RETIRED
    text = re.sub('(?<=[a-z0-9])(?=[A-Z][a-z])', '_', text)  # splits names of classes
    text = re.sub(r'[A-Z][a-z]+', lambda found: found[0].lower(), text)
    for found in pattern_of(words).finditer(text):
        yield text.count('\n', 0, found.start()) + 1, found[0]


@pytest.mark.parametrize('folder', sorted({path.relative_to(ROOT).parts[0] for path in FILES}))
def test_no_retired_words(folder):
    found = []
    for path in FILES:
        name = path.relative_to(ROOT).as_posix()
        if name.split('/')[0] == folder:
            is_package = name.startswith(PACKAGE) or '/' not in name
            found += [f'{name}:{line}: {word}'
                      for line, word in retired_words(read(path), is_package)]
    assert not found, 'see RETIRED for the terms to use:\n' + '\n'.join(found)


def test_all_files_are_read():
    assert len(FILES) > 300
    assert {'README.md', 'chainermn/__init__.py', 'docs/index.md', 'tests/conftest.py',
            'examples/mnist/README.md', 'docs/benchmarks/overlap.png',
            } <= {path.relative_to(ROOT).as_posix() for path in FILES}


@pytest.mark.parametrize('text', [
    'one verb at a time', '_verbs = {}', 'class ModelVerbs:', 'the ranks have agreed', 'Agreement:',
    'a witness of\neach node', 'def say_goodbye():', 'waits\npatiently', 'ManyPieces(3)',
    'if can_hide:', "today's Python", 'waits for\n    ever', 'who is Said(1)', 'a trial of',
    'colour', 'the rank gets on.'])
def test_words_are_found(text):
    assert len([*retired_words(text)]) == 1


@pytest.mark.parametrize('text', [
    'CHAINERMN_AGREE=0', '_environment.AGREE', "comm.refuse('f', error)", 'patience=3, patients=2',
    'what rank 0 gets on each call', 'for every rank', 'numpy.floor(x)', 'twine check', 'adverbs',
    'The flight recorder keeps recent operations.', 'header', 'artifacts', 'warehouses'])
def test_other_words_are_not_found(text):
    assert not [*retired_words(text)]
