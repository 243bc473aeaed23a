"""How Sphinx makes the site: our pages as they are on disk, links between them included.

The source folder is the root of the repository, so that a link from a page to an example, or from
README.md to a page, leads to the same place here and there.
"""

from __future__ import annotations

import pathlib
import runpy

import docutils.nodes
import sphinx.addnodes
from sphinx.application import Sphinx

ROOT = pathlib.Path(__file__).parents[1]

project = 'ChainerMN'
author = copyright = 'ChainerMN 8 authors'
version = release = runpy.run_path(str(ROOT / 'chainermn' / '_version.py'))['__version__']

root_doc = 'docs/index'
include_patterns = [
    'docs/**', 'README.md', 'CHANGELOG.md', 'CONTRIBUTING.md', 'examples/*/README.md',
    'examples/launch/digits.ipynb',
]
exclude_patterns = ['docs/_build', '**/.*', '**/__pycache__']

extensions = ['myst_nb', 'sphinx.ext.autodoc', 'sphinx.ext.napoleon', 'sphinx.ext.mathjax']

# A heading has the same anchor as on a page of a Git server.
myst_heading_anchors = 3
# The one notebook runs, and its last cell shows an error on purpose; any other fails the build.
nb_execution_mode = 'force'
nb_execution_raise_on_error = True
nb_execution_timeout = 600
nb_merge_streams = True

autodoc_member_order = 'bysource'
autodoc_preserve_defaults = True
autodoc_typehints = 'description'
autodoc_typehints_description_target = 'documented'
napoleon_numpy_docstring = False

# There is no intersphinx: a build needs no network. Names of others are left as text.
nitpick_ignore_regex = [
    ('py:.*', r'(chainer|numpy|np|cupy|mpi4py|MPI|collections|contextlib|os)\..*'),
    ('py:.*', r'chainermn\..*\._\w+'),  # what has no name for users, such as a type variable
]

html_theme = 'furo'
html_title = f'ChainerMN {release}'
html_copy_source = False
html_show_sphinx = False


def link_folders(app: Sphinx, doctree: docutils.nodes.document) -> None:
    """Leads a link to a folder, such as ``[mnist](../examples/mnist)``, to its README."""
    for node in doctree.findall(sphinx.addnodes.pending_xref):
        if node['reftype'] == 'myst' and node['refdomain'] is None:
            page = (ROOT / node['refdoc']).parent.joinpath(node['reftarget'], 'README.md').resolve()
            if page.is_file():
                node['refdomain'], node['reftargetid'] = 'doc', None
                node['reftarget'] = page.relative_to(ROOT).with_suffix('').as_posix()


def setup(app: Sphinx) -> None:
    """Adds the one thing that no extension does."""
    app.connect('doctree-read', link_folders)
