"""Sphinx configuration.

The source folder is the root of the repository, so that links between pages, README.md and
examples work both in the repository and on the site.
"""

from __future__ import annotations

import itertools
import pathlib
import re
import runpy

import docutils.nodes
import sphinx.addnodes
from sphinx.application import Sphinx

ROOT = pathlib.Path(__file__).parents[1]

project = 'ChainerMN'
author = copyright = 'ChainerMN 8 authors'
version = release = runpy.run_path(str(ROOT / 'chainermn' / '_version.py'))['__version__']

root_doc = 'docs/contents'  # index.md with a toctree, which GitHub would show as code
include_patterns = [
    'docs/**', 'README.md', 'CHANGELOG.md', 'CONTRIBUTING.md', 'examples/*/README.md',
    'examples/launch/digits.ipynb',
]
exclude_patterns = ['docs/index.md', 'docs/_build', '**/.*', '**/__pycache__']

extensions = ['myst_nb', 'sphinx.ext.autodoc', 'sphinx.ext.napoleon', 'sphinx.ext.mathjax']

# Generate the same anchors for headings as Git servers do.
myst_heading_anchors = 3
# The notebook is executed. Its last cell raises an error on purpose; other errors fail the build.
nb_execution_mode = 'force'
nb_execution_raise_on_error = True
nb_execution_timeout = 600
nb_merge_streams = True

autodoc_member_order = 'bysource'
autodoc_preserve_defaults = True
autodoc_typehints = 'description'
autodoc_typehints_description_target = 'documented'
napoleon_numpy_docstring = False

# No intersphinx, so that a build needs no network: references to other projects are plain text.
nitpick_ignore_regex = [
    ('py:.*', r'(chainer|numpy|np|cupy|mpi4py|MPI|collections|contextlib|os|torch|weakref)\..*'),
    ('py:.*', r'chainermn\.(\w+\.)*_\w+(\.\w+)*'),  # private names, such as type variables
    ('py:class', r'[\w ]+'),  # type aliases, such as Array, and names of private modules
]

html_theme = 'furo'
html_title = f'ChainerMN {release}'
html_copy_source = False
html_static_path = ['_static']
html_css_files = ['wrap.css']
html_show_sphinx = False


def link_folders(app: Sphinx, doctree: docutils.nodes.document) -> None:
    """Resolve links to folders, such as ``[mnist](../examples/mnist)``, and to index.md."""
    for node in doctree.findall(sphinx.addnodes.pending_xref):
        if node['reftype'] == 'myst' and node['refdomain'] is None:
            page = (ROOT / node['refdoc']).parent.joinpath(node['reftarget'], 'README.md').resolve()
            if page.is_file():
                node['refdomain'], node['reftargetid'] = 'doc', None
                node['reftarget'] = page.relative_to(ROOT).with_suffix('').as_posix()
        elif node['refdomain'] == 'doc' and node['reftarget'] == 'docs/index':
            node['reftarget'] = root_doc


def break_code(app: Sphinx, doctree: docutils.nodes.document) -> None:
    """Allow line breaks in the code of tables, between words."""
    for entry in doctree.findall(docutils.nodes.entry):
        for code in entry.findall(docutils.nodes.literal):
            words = re.split(r'(?<=[._(,/])(?=\w{4})', code.astext())
            parts = map(docutils.nodes.Text, words)
            breaks = (docutils.nodes.raw('', '<wbr>', format='html') for _ in words[1:])
            code.children = []
            code.extend(filter(None, itertools.chain(*itertools.zip_longest(parts, breaks))))


def setup(app: Sphinx) -> None:
    """Register the transformations of links and tables."""
    app.connect('doctree-read', link_folders)
    app.connect('doctree-read', break_code)
