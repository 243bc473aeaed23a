"""Sphinx extension: how code, types and the sidebar of the site look. docs/_static has the styles.

- Blocks of commands, files and output have different styles. A file has its name as a title, from
  the comment ``<!-- file: NAME -->`` above its block. If the block is a diff, a tab has the file.
- Each line of code is an element, so that long lines can be indented where they are wrapped.
- Types are public: a private class is shown as its public base class, and an alias as its types.
- Docstrings link to the pages that they mention. Source pages link to the documentation of objects.
- The sidebar shows one section at a time.
- On phones, rows of the tables of some pages are blocks.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

import bs4
import docutils.nodes
import numpy as np
import numpy.typing
import pygments.formatters
import sphinx.highlighting
import sphinx.pycode
import sphinx.util.logging
from sphinx.application import Sphinx
from sphinx_design.shared import create_component

#: Classes of blocks, by language. See code.css.
KINDS = {'sh': 'command', 'bash': 'command', 'text': 'output', 'diff': 'diff'}


#: Columns of a block, and of ones in small print, at the width of the page. See code.css.
COLUMNS, WIDE, WIDER = 101, 107, 116

#: Pages with tables whose rows are blocks on phones.
STACKED = {'docs/comparison', 'docs/migrating', 'docs/migrating_horovod', 'docs/migrating_pytorch'}

#: A line of output with several columns. See code.css.
ROW = re.compile(r'^(?:.*?\S {2,}(?=\S)){3}', re.MULTILINE)

logger = sphinx.util.logging.getLogger(__name__)


class LineFormatter(pygments.formatters.HtmlFormatter):
    """Puts each line into an element; also the markers of a diff, so that they are not copied."""

    def wrap(self, source: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
        """Return the lines of the block, and the elements around them."""
        lines = [*source]
        is_diff = any(line.startswith(('<span class="gi">', '<span class="gd">'))
                      for _, line in lines)
        mark = mark_diff if is_diff else mark_line
        return super().wrap((is_code, mark(line)) for is_code, line in lines)


def mark_line(line: str, kind: str = 'line', marker: int = 0) -> str:
    """Return the element of a line, which passes the indentation of the line to the style.

    Args:
        line: The line, as HTML.
        kind: The classes of the element.
        marker: Columns of the marker before the line, which count as indentation.
    """
    text = re.sub('<[^>]*>', '', line)
    indent = len(text) - len(text[marker:].lstrip(' '))
    style = f' style="--indent: {indent}ch"' if indent and text.strip() else ''
    kind += ' row' * bool(ROW.match(text)) + ' deep' * (indent > 24)
    # Wrap before a dot and after a parenthesis, rather than within a name.
    line = re.sub(r'(?=<span class="o">\.</span>)', '<wbr>', line)
    line = re.sub(r'(<span class="p">[(\[]+</span>)', r'\1<wbr>', line)
    return f'<span class="{kind}"{style}>{line[:-1]}</span>\n'


def mark_diff(line: str) -> str:
    """Return the element of a line of a diff."""
    kind = {'gi': 'line added', 'gd': 'line removed'}.get(
        (re.match('<span class="(g[id])">[-+]', line) or ['', ''])[1], 'line')
    # A line is one token. Wrap it at the same places as code.
    line = re.sub(r'(?<=[\w)\]])(?=\.[a-zA-Z])|(?<=\w\()(?=[\w\'"&])', '<wbr>', line)
    line = re.sub(r'^((?:<span[^>]*>)?)([-+ ])', r'\1<span class="marker">\2</span>', line)
    line = mark_line(line, kind, marker=1)
    # If a line is not copied, its end must not be copied.
    return f'{line[:-1]}<span class="marker">\n</span>' if 'removed' in kind else line


def style_blocks(app: Sphinx, doctree: docutils.nodes.document) -> None:
    """Give each block of code the class of its kind, and each file its title."""
    for block in [*doctree.findall(docutils.nodes.literal_block)]:
        name = file_name(block)
        kind = 'code' if name else KINDS.get(block.get('language', ''), 'code')
        if 'output' not in block['classes']:  # outputs of notebooks already have it
            block['classes'].append(kind)
        if block.get('language') in ('none', app.config.highlight_language):
            logger.warning('code without a language', location=block, type='appearance')
        width = max(map(len, block.astext().splitlines()))
        if kind == 'output' and COLUMNS < width <= WIDER:
            block['classes'].append('wide' if width <= WIDE else 'wider')
        if kind == 'output' and len(ROW.findall(block.astext())) > 1:
            block['classes'].append('columns')
        if name:
            if block.get('language') == 'diff':
                text = re.sub('^(?:-.*\n?|[+ ])', '', block.astext(), flags=re.MULTILINE)
                file = docutils.nodes.literal_block(text, text, language='python', classes=['code'])
                block.replace_self(tabs({'Changes': titled(doctree, name, block),
                                         'Complete file': titled(doctree, name, file)}))
            else:
                block.replace_self(titled(doctree, name, block))


def titled(doctree: docutils.nodes.document, name: str, block: docutils.nodes.literal_block
           ) -> docutils.nodes.container:
    """Return a copy of a block with the name of the file as its title."""
    # The classes are those of a code-block directive with a caption.
    file = docutils.nodes.container(
        '', docutils.nodes.caption(name, name), block.deepcopy(), literal_block=True,
        classes=['literal-block-wrapper'])
    doctree.set_id(file)
    return file


def tabs(contents: dict[str, docutils.nodes.Node]) -> docutils.nodes.container:
    """Return tabs with these labels, as the directives of sphinx-design do."""
    return create_component('tab-set', classes=['sd-tab-set'], children=[
        create_component('tab-item', classes=['sd-tab-item'], selected=False, children=[
            docutils.nodes.rubric(label, label, classes=['sd-tab-label']),
            create_component('tab-content', classes=['sd-tab-content'], children=[content])])
        for label, content in contents.items()])


def file_name(block: docutils.nodes.literal_block) -> str:
    """Return the file's name from the comments above a block, or ''."""
    siblings = block.parent.children
    for node in reversed(siblings[:siblings.index(block)]):
        if not isinstance(node, docutils.nodes.raw | docutils.nodes.comment):
            break
        found = re.match(r'<!--\s*file:\s*(.*?)\s*-->', node.astext())
        if found:
            return found[1]
    return ''


def join_streams(merge: Callable[[list[Any]], list[Any]], outputs: list[Any]) -> list[Any]:
    """Join the parts of each stream of a notebook's cell. MyST-NB would put each on its own line.

    Args:
        merge: MyST-NB's function.
        outputs: All outputs of the cell.
    """
    streams: dict[str, Any] = {}
    joined = []
    for output in outputs:
        name = output.get('name') if output['output_type'] == 'stream' else None
        if name in streams:
            streams[name]['text'] += output['text']
            continue
        joined.append(output)
        if 'traceback' in output:  # omit the folders of this machine
            output['traceback'] = [re.sub(r'~?/(?:[\w.+~-]+/)*(?=chainermn/)', '.../', part)
                                   for part in output['traceback']]
        if name:
            streams[name] = output
    return merge(joined)


def order_fields(app: Sphinx, domain: str, kind: str, content: docutils.nodes.Element) -> None:
    """Put the type of the result below its description, and before the exceptions."""
    for fields in content.findall(docutils.nodes.field_list):
        names = [field[0].astext().split()[0] for field in fields]
        if 'rtype' in names and 'returns' in names:
            rtype = fields.children.pop(names.index('rtype'))
            rtype['support_smartquotes'] = False
            fields.insert(names.index('returns') + 1, rtype)


def show_public_types(app: Sphinx, obj: Any, bound: bool) -> None:
    """Replace private types in the annotations of a function, before autodoc reads them."""
    function = inspect.unwrap(getattr(obj, '__func__', obj))
    if not inspect.isfunction(function):
        return
    publish(function.__annotations__, function.__module__)  # which its wrappers share
    if '__signature__' in vars(function):  # a copy with the source of default values
        types = function.__annotations__
        signature = function.__signature__
        function.__signature__ = signature.replace(
            parameters=[each.replace(annotation=types.get(each.name, each.annotation))
                        for each in signature.parameters.values()],
            return_annotation=types.get('return', signature.return_annotation))
    # Show the signature that all overloads have in common. Their types are in the description.
    analyzer = sphinx.pycode.ModuleAnalyzer.for_module(function.__module__)
    analyzer.analyze()
    analyzer.overloads.pop(function.__qualname__, None)


def show_public_attributes(app: Sphinx, what: str, name: str, obj: Any, *_: Any) -> None:
    """Replace private types in the annotations of a class."""
    if what in ('class', 'exception'):
        publish(vars(obj).get('__annotations__', {}), obj.__module__)


def publish(annotations: dict[str, Any], module: str) -> None:
    """Replace private types and aliases by public types.

    Args:
        annotations: The types, which are replaced.
        module: The module of their names.
    """
    for name, annotation in annotations.items():
        annotations[name] = public_type(annotation, module)


class Names(dict[str, Any]):
    """The names of a module. Other names are those of an alias's module."""

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            raise KeyError(name)
        modules = [module for module in sys.modules if module.startswith('chainermn.')]
        for module in ('chainermn._types', *modules):
            found = names_of_types(module).get(name)
            if found is not None:
                return found
        raise KeyError(name)


@functools.cache
def names_of_types(module: str) -> Names:
    """Return the global names of a module, also those that only type checkers import."""
    names = Names(vars(sys.modules[module]))
    try:
        source = inspect.getsource(sys.modules[module])
    except OSError:  # an empty file
        return names
    for block in ast.walk(ast.parse(source)):
        if isinstance(block, ast.If) and ast.unparse(block.test) == 'TYPE_CHECKING':
            for statement in block.body:
                try:
                    exec(ast.unparse(statement), {**names}, names)
                except ImportError:  # CuPy or PyTorch is not installed
                    names.update((alias.name, absent_type(alias.name))
                                 for alias in statement.names)
    return names


class AbsentType(type):
    """The type of names of packages that are not installed. Their attributes are such names."""

    def __getattr__(cls, name: str) -> type:
        if name.startswith('_'):
            raise AttributeError(name)
        return absent_type(f'{cls.__name__}.{name}')


@functools.cache
def absent_type(name: str) -> type:
    """Return a type that is shown with this name, which may contain dots."""
    return AbsentType(name, (), {'__module__': 'builtins'})


def public_type(annotation: Any, module: str = 'chainermn._types') -> Any:
    """Return the public form of a type, or ``Any`` if it has none.

    Args:
        annotation: A type, or its source.
        module: The module of the names in the source.
    """
    if isinstance(annotation, typing.ForwardRef):
        annotation = annotation.__forward_arg__
    if isinstance(annotation, str):
        return public_type(evaluated(annotation, module), module)
    if annotation == numpy.typing.DTypeLike:
        return DTypeLike
    if getattr(annotation, '__name__', '') == 'ndarray':  # of NumPy, of CuPy, or in place of CuPy's
        return absent_type('numpy.ndarray' if annotation is np.ndarray else 'cupy.ndarray')
    if isinstance(annotation, typing.TypeVar):
        return public_type(annotation.__bound__ or Any, module)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return typing.Union[tuple(  # noqa: UP007 -- also of strings
            public_type(one, module) for one in arguments)]
    if arguments and origin is not typing.Literal:
        arguments = tuple(
            [public_type(part, module) for part in one] if isinstance(one, list)
            else public_type(one, module) for one in arguments)
        return annotation.copy_with(arguments) if hasattr(annotation, 'copy_with') else (
            origin[arguments])
    if isinstance(annotation, type) and annotation.__name__.startswith('_'):
        bases = (base for base in annotation.__mro__[1:] if not base.__name__.startswith('_')
                 and base not in (builtins.object, typing.Generic, typing.Protocol))
        return next(bases, Any)
    return annotation


def evaluated(source: str, module: str) -> Any:
    """Evaluate the source of a type. In a union, it may contain aliases that are strings."""
    tree = ast.parse(source, mode='eval').body
    if isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.BitOr):
        return typing.Union[tuple(  # noqa: UP007
            public_type(ast.unparse(part), module) for part in (tree.left, tree.right))]
    return eval(source, {}, names_of_types(module))


class DTypeLike:
    """Shown for ``numpy.typing.DTypeLike``, which is a union of private types."""


DTypeLike.__module__ = 'numpy.typing'


def link_pages(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Link to the pages that a docstring mentions, such as ``docs/checkpoints.md``."""
    lines[:] = [re.sub(r'\bdocs/([\w/]+)\.md\b', r':doc:`/docs/\1`', line) for line in lines]


def shorten_types(app: Sphinx, what: str, name: str, obj: Any, options: Any,
                  lines: list[str]) -> None:
    """Omit modules from the types of attributes, as autodoc does from other types."""
    lines[:] = [
        re.sub(r'\b(\w+\.)+(?=[A-Z])', '', line) if re.match(' *:(var)?type', line) else line
        for line in lines]


def link_documentation(app: Sphinx, page: str, template: str, context: dict[str, Any],
                       doctree: docutils.nodes.document | None) -> None:
    """Correct the links of a source page: viewcode assumes one module name for all its objects."""
    if not page.startswith('_modules/'):
        return
    anchors = {(app.builder.get_relative_uri(page, entry.docname), name): entry.node_id
               for name, entry in app.env.domains.python_domain.objects.items()}

    def corrected(link: re.Match[str]) -> str:
        start, name, uri, anchor = link.groups()
        anchor = anchors.get((uri, anchor)) or next(
            (node for (where, full_name), node in anchors.items()
             if where == uri and full_name.removesuffix(f'.{name}') in sys.modules), '')
        return f'{start}{uri}#{anchor}"'

    context['body'] = re.sub(
        r'(id="([\w.]+)">\s*<a class="viewcode-back" href=")([^"#]*)#([^"]*)"', corrected,
        context['body'])


def label_cells(app: Sphinx, page: str, template: str, context: dict[str, Any],
                doctree: docutils.nodes.document | None) -> None:
    """Give each cell of a table the title of its column, for rows that are blocks on phones."""
    if page not in STACKED:
        return
    body = bs4.BeautifulSoup(context['body'], 'html.parser')
    for table in body.select('table'):
        table['class'].append('stacked')
        titles = [cell.get_text(strip=True) for cell in table.select('thead th')]
        for row in table.select('tbody tr'):
            for title, cell in zip(titles, row.select('td'), strict=True):
                cell['data-title'] = title
                if not cell.get_text(strip=True):
                    cell['class'] = [*cell.get('class', []), 'empty']
    context['body'] = str(body)


def break_contents(app: Sphinx, page: str, template: str, context: dict[str, Any],
                   doctree: docutils.nodes.document | None) -> None:
    """Allow line breaks within the names in the contents beside a page."""
    breaks = re.compile('(?<=[a-z])(?=[A-Z])|(?<=[a-z]_)')
    context['toc'] = re.sub(
        '(?<="pre">)[^<]*', lambda name: breaks.sub('<wbr>', name[0]), context.get('toc', ''))


def fold_sidebar(app: Sphinx, page: str, template: str, context: dict[str, Any],
                 doctree: docutils.nodes.document | None) -> None:
    """Fold each section of the sidebar, except the one of the page."""
    tree = bs4.BeautifulSoup(context.get('furo_navigation_tree', ''), 'html.parser')
    sections = tree.select('p.caption')
    for caption in sections:
        entries = caption.find_next_sibling('ul')
        section = tree.new_tag('details', attrs={'class': 'section'})
        if entries.select_one('.current') or (page == app.config.root_doc and not tree.details):
            section['open'] = ''
        caption.insert_before(section)
        caption.name = 'summary'
        del caption['role']
        section.extend([caption.extract(), entries.extract()])
    if sections:
        context['furo_navigation_tree'] = str(tree)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the functions of this module."""
    sphinx.highlighting.PygmentsBridge.html_formatter = LineFormatter
    render = importlib.import_module('myst_nb.core.render')
    render.coalesce_streams = functools.partial(join_streams, render.coalesce_streams)
    app.setup_extension('sphinx.ext.autodoc')
    app.connect('doctree-read', style_blocks)
    app.connect('object-description-transform', order_fields, priority=900)  # after autodoc
    # Before the handler that keeps default values, which copies the signature.
    app.connect('autodoc-before-process-signature', show_public_types, priority=400)
    app.connect('autodoc-process-signature', show_public_attributes, priority=400)
    app.connect('autodoc-process-docstring', link_pages)
    app.connect('autodoc-process-docstring', shorten_types, priority=900)  # after napoleon
    app.connect('html-page-context', link_documentation)
    app.connect('html-page-context', label_cells)
    app.connect('html-page-context', break_contents)
    app.connect('html-page-context', fold_sidebar, priority=900)  # after the theme
    return {'version': '1', 'parallel_read_safe': True}
