"""Links between pages, and to files and folders of the repository, are not broken."""

import pathlib
import re

import pytest

pytestmark = pytest.mark.mpi_skip

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [path for pattern in ('*.md', 'docs/**/*.md', 'examples/*/README.md')
         for path in sorted(ROOT.glob(pattern))]
BLOCK = re.compile(r'^ *```.*?^ *```$', re.MULTILINE | re.DOTALL)


def anchors(page):
    """What a Git server, and the site, call the headings of a page."""
    text = BLOCK.sub('', page.read_text(encoding='utf-8'))
    for heading in re.findall(r'^#+ (.*)$', text, re.MULTILINE):
        yield re.sub(r'[^\w\- ]', '', heading.lower()).replace(' ', '-')


def test_links():
    for page in PAGES:
        text = BLOCK.sub('', page.read_text(encoding='utf-8'))
        for link in re.findall(r'\]\(([^)\s]+)\)', text):
            if re.match(r'\w+:', link):
                continue
            path, _, anchor = link.partition('#')
            there = page.parent / path if path else page
            assert there.exists(), (page, link)
            assert not anchor or anchor in anchors(there), (page, link)


def test_files_that_a_page_names():
    """Such as `tests/test_run.py`; a name without a folder is in that of the name before."""
    for page in PAGES:
        folder = None
        for name in re.findall(r'`((?:tests|benchmarks)/[\w/.]+\.py|test_\w+\.py)`',
                               page.read_text(encoding='utf-8')):
            path = ROOT / name if '/' in name else folder / name
            assert path.exists(), (page, name)
            folder = path.parent


def test_the_index_has_all_pages():
    index = ROOT.joinpath('docs/all_pages.md').read_text(encoding='utf-8')
    pages = {path.name for path in ROOT.glob('docs/*.md')} - {'front.md', 'all_pages.md'}
    assert len(pages) > 10
    assert not {page for page in pages if f']({page})' not in index}
    contents = ROOT.joinpath('docs/index.rst').read_text(encoding='utf-8').split()
    assert not {page for page in pages if page.removesuffix('.md') not in contents}


def test_the_index_and_the_site_have_the_same_sections():
    index = ROOT.joinpath('docs/all_pages.md').read_text(encoding='utf-8')
    contents = ROOT.joinpath('docs/index.rst').read_text(encoding='utf-8')
    assert re.findall(r'^(?:\*\*|## )(\w[\w ]+)(?:\*\*)?$', index, re.M) == re.findall(
        '^   :caption: (.*)$', contents, re.M) == [
            'Getting started', 'Guides', 'Clusters', 'Performance', 'Troubleshooting', 'Migrating',
            'API', 'Development', 'Examples']


def test_the_sidebar_has_no_title_twice():
    docs = ROOT / 'docs'
    contents = docs.joinpath('index.rst').read_text(encoding='utf-8')
    titles = {}
    for name in re.findall(r'^   ((?:\.\./)*[\w/]+)$', contents, re.M):
        for page in docs.glob(f'{name}.md'):
            titles[name] = re.search('^# (.*)$', page.read_text(encoding='utf-8'), re.M)[1]
    assert len(titles) > 40
    assert len(set(titles.values())) == len(titles), sorted(titles.values())
