"""What docs/appearance.py, docs/conf.py and docs/search.js change on the site."""

import importlib
import pathlib
import re
import runpy
import sys
import typing
from types import SimpleNamespace

import pytest

docutils = pytest.importorskip('docutils')
pytest.importorskip('sphinx_design')
pytest.importorskip('bs4')
pytestmark = pytest.mark.mpi_skip

importlib.import_module('docutils.nodes')
importlib.import_module('docutils.utils')
DOCS = pathlib.Path(__file__).parents[2] / 'docs'


def run_path(name, monkeypatch):
    monkeypatch.setattr(sys, 'path', [str(DOCS), *sys.path])
    return runpy.run_path(str(DOCS / name))


def test_docstrings_link_to_pages(monkeypatch):
    lines = ['Long.', '(see docs/reference/commands.md).']
    run_path('appearance.py', monkeypatch)['link_pages'](None, '', '', None, None, lines)
    assert lines == ['Long.', '(see :doc:`/docs/reference/commands`).']


def test_source_pages_link_to_documented_names(monkeypatch):
    importlib.import_module('chainermn.links')
    names = {f'chainermn.{name}': SimpleNamespace(docname='docs/api', node_id=f'id-{name}')
             for name in ('Queue.put', 'links.Queue.get', 'links.put', 'links.Other.put')}
    app = SimpleNamespace(
        builder=SimpleNamespace(get_relative_uri=lambda page, name: f'../{name}.html'),
        env=SimpleNamespace(domains=SimpleNamespace(python_domain=SimpleNamespace(objects=names))))
    found = []
    for name in 'Queue.put', 'Queue.get', 'put', 'absent':
        context = {'body': f'<div id="{name}">\n<a class="viewcode-back" '
                           f'href="../docs/api.html#chainermn.{name}">[docs]</a>'}
        run_path('appearance.py', monkeypatch)['link_documentation'](
            app, '_modules/chainermn/links', '', context, None)
        found += re.findall('href="../docs/api.html#([^"]*)"', context['body'])
    assert found == ['id-Queue.put', 'id-links.Queue.get', 'id-links.put', '']


def test_names_in_the_contents_can_be_broken(monkeypatch):
    context = {'toc': '<a href="#a_b"><span class="pre">a_b.CdEf()</span></a>'}
    run_path('appearance.py', monkeypatch)['break_contents'](None, '', '', context, None)
    assert context['toc'] == '<a href="#a_b"><span class="pre">a_<wbr>b.Cd<wbr>Ef()</span></a>'


def test_lines_of_a_diff_are_wrapped_like_code(monkeypatch):
    line = run_path('appearance.py', monkeypatch)['mark_diff'](
        '<span class="gi">+  a = b.c(d)  # 1.5</span>\n')
    assert 'style="--indent: 3ch"' in line
    assert 'a = b<wbr>.c(<wbr>d)  # 1.5</span>' in line


@pytest.mark.parametrize('page, link, to', [
    ('docs/install', '../README.md', 'index.rst'),
    ('docs/reference/commands', '../../README.md#install', '../install.md'),
    ('CONTRIBUTING', 'README.md#run-an-example-and-the-tests', 'path:README.md'),
    ('docs/all_pages', '../examples/mnist/README.md', '../examples/mnist/README.md')])
def test_links_to_the_readme(page, link, to, monkeypatch):
    source = [f'[text]({link})']
    run_path('conf.py', monkeypatch)['replace_readme'](None, page, source)
    assert source == [f'[text]({to})']


def test_pages_for_sections_of_the_readme(monkeypatch):
    headings = re.findall('^## (.*)$', DOCS.with_name('README.md').read_text(encoding='utf-8'),
                          re.M)
    anchors = {f'#{each.lower().replace(" ", "-")}' for each in headings}
    for section, page in run_path('conf.py', monkeypatch)['PAGES_OF_README'].items():
        assert section is None or section in anchors
        assert (DOCS / page).is_file()


@pytest.mark.parametrize('address, command, text', [
    ('https://host/clone', 'git clone https://host/clone chainermn\n',
     'Clone it (`git clone https://host/clone chainermn`), and'),
    ('', '', 'Clone it, and')])
def test_the_address_of_the_repository(address, command, text, monkeypatch):
    monkeypatch.setenv('DOCS_REPOSITORY', address)
    configuration = run_path('conf.py', monkeypatch)
    before = 'git clone ADDRESS_OF_THIS_REPOSITORY chainermn'
    assert configuration['replace_address'](f'{before}\nls') == f'{command}ls'
    assert configuration['replace_address'](f'Clone it (`{before}`), and') == text
    assert ('source_repository' in configuration['html_theme_options']) == bool(address)
    for page in 'front.md', 'install.md':
        assert before in DOCS.joinpath(page).read_text(encoding='utf-8')


def test_default_values_are_broken_between_words(monkeypatch):
    value = docutils.nodes.inline('', 'chainer.dataset.concat_examples',
                                  classes=['default_value'])
    content = docutils.nodes.container()
    docutils.nodes.container('', value, content)
    run_path('conf.py', monkeypatch)['break_default_values'](None, 'py', 'function', content)
    assert [each.astext() for each in value] == [
        'chainer.', '<wbr>', 'dataset.', '<wbr>', 'concat_', '<wbr>', 'examples']


def test_a_diff_of_a_file_has_a_tab_with_the_file(monkeypatch):
    document = docutils.utils.new_document('page')
    text = ' a\n-b\n+c\n'
    document += [docutils.nodes.comment('', '<!-- file: x.py -->'),
                 docutils.nodes.literal_block(text, text, language='diff')]
    app = SimpleNamespace(config=SimpleNamespace(highlight_language='default'))
    run_path('appearance.py', monkeypatch)['style_blocks'](app, document)
    assert [(each['language'], each.astext())
            for each in document.findall(docutils.nodes.literal_block)] == [
                ('diff', text), ('python', 'a\nc\n')]
    assert [each.astext() for each in document.findall(docutils.nodes.rubric)] == [
        'Changes', 'Complete file']


def test_cells_have_the_titles_of_their_columns(monkeypatch):
    table = ('<table class="docutils"><thead><tr><th>a</th><th>b</th></tr></thead>'
             '<tbody><tr><td>1</td><td> </td></tr></tbody></table>')
    context = {'body': table}
    label_cells = run_path('appearance.py', monkeypatch)['label_cells']
    label_cells(None, 'docs/install', '', context, None)
    assert context['body'] == table
    label_cells(None, 'docs/comparison', '', context, None)
    assert '<td data-title="a">1</td><td class="empty" data-title="b"> </td>' in context['body']


def test_pages_with_blocks_as_rows_exist(monkeypatch):
    for page in run_path('appearance.py', monkeypatch)['STACKED']:
        assert DOCS.parent.joinpath(f'{page}.md').is_file()


def test_pages_whose_scores_differ():
    for names in re.findall(r'\(([\w/\\|]{20,})\)', DOCS.joinpath('search.js').read_text()):
        for name in names.replace('\\', '').split('|'):
            assert [*DOCS.glob(f'{name}.*'), *DOCS.parent.glob(f'{name}.md')], name


def test_parts_of_a_stream_are_joined(monkeypatch):
    outputs = [{'output_type': 'stream', 'name': name, 'text': text} for name, text in (
        ('stdout', 'a\nb'), ('stderr', 'x'), ('stdout', 'c\n'))]
    joined = run_path('appearance.py', monkeypatch)['join_streams'](lambda merged: merged, outputs)
    assert [(each['name'], each['text']) for each in joined] == [
        ('stdout', 'a\nbc\n'), ('stderr', 'x')]


def test_tracebacks_of_notebooks_have_no_folders_of_this_machine(monkeypatch):
    error = {'output_type': 'error', 'traceback': [
        f'File {folder}chainermn/_file.py:1, in' for folder in ('/a/chainermn/', '~/')]}
    joined = run_path('appearance.py', monkeypatch)['join_streams'](
        lambda merged: merged, [error])
    assert joined[0]['traceback'] == ['File .../chainermn/_file.py:1, in'] * 2


def test_types_are_public(monkeypatch):
    import numpy as np

    import chainermn

    class _Private(dict):
        pass

    def names(annotation, module='chainermn._types'):
        shown = public_type(annotation, module)
        return [each.__name__ for each in typing.get_args(shown) or [shown]]

    array = type('ndarray', (), {})  # in place of CuPy's
    public_type = run_path('appearance.py', monkeypatch)['public_type']
    assert names(_Private) == ['dict']
    assert names(np.ndarray | array) == ['numpy.ndarray', 'cupy.ndarray']
    assert names('VariableOrArray | None') == [
        'Variable', 'numpy.ndarray', 'cupy.ndarray', 'NoneType']
    assert names('CommunicatorBase', chainermn.datasets.__name__) == ['CommunicatorBase']
