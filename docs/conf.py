"""Sphinx configuration.

The source folder is the root of the repository, so that links between pages, README.md and
examples work both in the repository and on the site.
"""

from __future__ import annotations

import itertools
import os
import pathlib
import re
import runpy
import sys

import docutils.nodes
import sphinx.addnodes
from sphinx.application import Sphinx

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / 'docs'))  # appearance.py

project = 'ChainerMN'
author = copyright = 'ChainerMN 8 authors'
version = release = runpy.run_path(str(ROOT / 'chainermn' / '_version.py'))['__version__']

root_doc = 'docs/index'  # front.md with a toctree, which GitHub would show as code
#: The address of the repository, such as https://github.com/NAME/chainermn. If it is not
#: set, pages omit the command that clones the repository.
REPOSITORY = os.environ.get('DOCS_REPOSITORY', '').rstrip('/')

include_patterns = [
    'docs/**', 'CHANGELOG.md', 'CONTRIBUTING.md', 'examples/*/README.md',
    'examples/launch/digits.ipynb',
]
exclude_patterns = ['docs/front.md', 'docs/_build', '**/.*', '**/__pycache__']

extensions = [
    'appearance', 'myst_nb', 'sphinx.ext.autodoc', 'sphinx.ext.autosummary',
    'sphinx.ext.napoleon', 'sphinx.ext.viewcode', 'sphinx_copybutton', 'sphinx_design',
]

myst_enable_extensions = ['attrs_block', 'colon_fence']  # for front.md
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

# Output has no copy button. For a diff, the button copies the program with the changes.
copybutton_selector = 'div:not(.output) > div.highlight > pre'
copybutton_exclude = '.removed, .marker'
copybutton_prompt_text = r'>>> |\.\.\. '
copybutton_prompt_is_regexp = True
# The index of the reference uses autosummary for its tables only.
autosummary_generate = False

# No intersphinx, so that a build needs no network: references to other projects are plain text.
nitpick_ignore_regex = [
    ('py:.*', r'(chainer|numpy|np|cupy|mpi4py|MPI|collections|contextlib|os|torch|weakref)\..*'),
    ('py:.*', r'chainermn\.(\w+\.)*_\w+(\.\w+)*'),  # private names, such as type variables
    ('py:class', r'[\w ]+'),  # type aliases, such as Array, and names of private modules
]

html_theme = 'furo'
pygments_dark_style = 'github-dark'
html_title = f'ChainerMN {release.partition(".dev")[0]}{" (development)" * (".dev" in release)}'
python_maximum_signature_line_length = 80  # longer ones have one parameter per line
toc_object_entries_show_parents = 'hide'
html_copy_source = False
html_extra_path = ['_root']  # index.html, which leads to the front page
html_static_path = ['_static']
html_favicon = html_logo = '_static/favicon.svg'
html_css_files = ['code.css', 'site.css']
html_search_scorer = str(ROOT / 'docs' / 'search.js')
html_theme_options = {
    'light_css_variables': {
        'color-added': '#dcf5e0', 'color-added-marker': '#116329',
        'color-removed': '#fde4e1', 'color-removed-marker': '#a40e26',
        'color-block': '#f3f4f6', 'color-terminal': '#22272e',
    },
    'dark_css_variables': {
        'color-added': '#12371f', 'color-added-marker': '#7ee2a0',
        'color-removed': '#4a1b1b', 'color-removed-marker': '#ffaca0',
        'color-block': '#1d2128', 'color-terminal': '#07090c',
    },
}
if REPOSITORY:
    html_theme_options |= {'source_repository': REPOSITORY, 'source_branch': 'HEAD',
                           'top_of_page_buttons': ['view']}
html_show_sphinx = False

#: The site has no README.md, because it resembles the front page. Links to its sections lead to
#: these pages.
PAGES_OF_README = {
    None: 'index.rst', '#install': 'install.md', '#from-chainer-to-chainermn': 'tutorial.md',
    '#errors-instead-of-hangs': 'reliability.md',
}


def link_folders(app: Sphinx, doctree: docutils.nodes.document) -> None:
    """Resolve links to folders, such as ``[mnist](../examples/mnist)``."""
    for node in doctree.findall(sphinx.addnodes.pending_xref):
        if node['reftype'] == 'myst' and node['refdomain'] is None:
            page = (ROOT / node['refdoc']).parent.joinpath(node['reftarget'], 'README.md').resolve()
            if page.is_file():
                node['refdomain'], node['reftargetid'] = 'doc', None
                node['reftarget'] = page.relative_to(ROOT).with_suffix('').as_posix()


def break_code(app: Sphinx, doctree: docutils.nodes.document) -> None:
    """Allow line breaks in code within text and tables, between words."""
    for code in doctree.findall(docutils.nodes.literal):
        if isinstance(code.parent, docutils.nodes.title):  # also shown in the sidebar
            continue
        text = code.astext()
        words = re.split(r'(?:(?<=[.(,/])(?<!\./)|(?<=[a-zA-Z\d]_))(?=\w{4})', text)
        parts = map(docutils.nodes.Text, words)
        breaks = (docutils.nodes.raw('', '<wbr class="within">' if word[-1] == '_' else '<wbr>',
                                     format='html') for word in words[:-1])
        if len(text) < 30:
            code['classes'].append('short')
        code.children = []
        code.extend(filter(None, itertools.chain(*itertools.zip_longest(parts, breaks))))


def break_default_values(app: Sphinx, domain: str, kind: str,
                         content: docutils.nodes.Element) -> None:
    """Allow line breaks in default values, between words."""
    for value in content.parent.findall(docutils.nodes.inline):
        if 'default_value' in value['classes'] and len(value.astext()) > 20:
            words = re.split(r'(?<=[._])(?=\w{3})', value.astext())
            value.children = []
            for i, word in enumerate(words):
                value.extend([docutils.nodes.raw('', '<wbr>', format='html')] * bool(i)
                             + [docutils.nodes.Text(word)])


def replace_address(text: str) -> str:
    """Insert the address of the repository, or omit the commands that need it."""
    command = 'git clone ADDRESS_OF_THIS_REPOSITORY'
    if REPOSITORY:
        return text.replace(command, f'git clone {REPOSITORY}')
    return re.sub(rf'^{command}.*\n| \(`{command}[^`]*`\)', '', text, flags=re.MULTILINE)


def replace_address_in_blocks(app: Sphinx, doctree: docutils.nodes.document) -> None:
    """Replace the address in blocks of code, also of the included front.md."""
    for block in doctree.findall(docutils.nodes.literal_block):
        text = replace_address(block.astext())
        if text != block.astext():
            block.rawsource, block.children = text, []
            block += docutils.nodes.Text(text)


def replace_readme(app: Sphinx, page: str, source: list[str]) -> None:
    """Let links to sections of README.md lead to pages; others download it. Replace the address."""
    folder = (ROOT / page).parent

    def replace(link: re.Match[str]) -> str:
        path, section = link.groups()
        if (folder / path).resolve() != ROOT / 'README.md':
            return link[0]
        if section not in PAGES_OF_README:
            return f'](path:{path})'
        return f']({os.path.relpath(ROOT / "docs" / PAGES_OF_README[section], folder)})'

    source[0] = replace_address(source[0])
    source[0] = re.sub(r'\]\(((?:\.\./)*README\.md)(#[\w-]+)?\)', replace, source[0])


def setup(app: Sphinx) -> None:
    """Register the transformations of links and code."""
    app.connect('source-read', replace_readme)
    app.connect('object-description-transform', break_default_values)
    app.connect('doctree-read', link_folders)
    app.connect('doctree-read', break_code)
    app.connect('doctree-read', replace_address_in_blocks)
