"""The summary at the top of the page: frequent questions, answered from the tables below."""

import pathlib
import re
from collections.abc import Mapping

import _rounds
import _tables
from _rounds import DDP, MPI4PY, TORCH, V8


class Results:
    """The tables of all outputs in a folder."""

    def __init__(self, folder: pathlib.Path) -> None:
        texts = {path.stem: path.read_text(encoding='utf-8') for path in folder.glob('*.txt')}
        self._tables = {name: _tables.tables(text) for name, text in texts.items()}
        #: Name of the GPU on which the benchmark ``gpu_step`` ran.
        self.gpu = texts.get('gpu_step', '').partition(';')[0]

    def value(self, name: str, column: str, *start: str, caption: str = ''
              ) -> int | float | None:
        """Return a number from the row of a benchmark that starts with these cells, or None."""
        for table in self._tables.get(name, []):
            if caption in table.caption:
                found = table.value(column, *start)
                if found is not None:
                    return found
        return None


def summary(folder: pathlib.Path, sections: Mapping[str, str]) -> str:
    """Return the questions of the summary, with their tables."""
    results = Results(folder)
    return (_table('How fast is a training step, compared with PyTorch?',
                   ['model', 'device, dtype', V8, TORCH, f'{V8} / {TORCH}'],
                   _steps(results), sections, 'training_step', 'gpu_step',
                   caption='Median times in ms. On CPUs, the last column is the median of the '
                           'ratios within each round, so it can differ from the ratio of the two '
                           f'times. Below 1, {V8} is faster')
            + _table('How does it scale on one node and on several?',
                     ['operation', 'nodes', 'ranks per node', f'{V8}, ms', f'{DDP}, ms',
                      f'{V8} / {DDP}'],
                     _scaling(results), sections, 'weak_scaling', 'mean_grad', 'training_step',
                     'hosts', caption='Times on one machine, on which several nodes are virtual '
                                      'hosts')
            + _table('How much overhead do safety checks and recording add?',
                     ['check', 'operation', 'without', 'with', 'with / without'],
                     _checks(results), sections, 'collectives', 'recent', 'timeline',
                     'run_record', caption='Medians. The last column is the median of the ratios '
                                           'within each round, so it can differ from the ratio of '
                                           'the two values, and differences of a few percent are '
                                           'noise')).rstrip('\n')


def _table(title: str, columns: list[str], rows: list[list], sections: Mapping[str, str],
           *names: str, caption: str = '') -> str:
    """Return a table of the rows without missing numbers, and links to the sections."""
    cells = [[_rounds.cell(each) for each in row] for row in rows if None not in row]
    if not cells:
        return ''
    links = []
    for name in names:
        if name in sections:
            own = re.search(r'^Measured on ([\d-]+)', sections[name], re.MULTILINE)
            links.append(f'[{_tables.SECTIONS[name].title}](#{_tables.SECTIONS[name].anchor})'
                         + (f' ({own[1]})' if own else ''))
    return (f'### {title}\n\n{_tables.markdown(_tables.Table(caption, columns, cells))}\n'
            f'Source: {", ".join(links)}.\n\n')


def _compared(start: list, a: float | None, b: float | None) -> list:
    """Return a row with two numbers and their ratio."""
    return [*start, a, b, a / b if a is not None and b else None]


def _step(results: Results, start: list, *place: str) -> list:
    """Return the row of a training step, with the ratio from its table."""
    return [*start, *(results.value('training_step', column, *place, caption='float32')
                      for column in (f'{V8}, ms', f'{TORCH}, ms', f'{V8} / {TORCH}'))]


def _steps(results: Results) -> list[list]:
    rows = [_step(results, [model, 'CPU, float32'], model, '1', '1')
            for model in ('ResNet-50', 'CNN', 'LSTM')]
    rows += [_compared(['ResNet-50', f'GPU ({results.gpu}), {dtype}'], *(
        results.value('gpu_step', 'time, ms', f'{name}, {dtype}') for name in (V8, TORCH)))
        for dtype in ('float32', 'bfloat16')]
    return rows


def _scaling(results: Results) -> list[list]:
    rows = [_compared(['communication in a step of a small ResNet', '1', '2'], *(
        results.value('weak_scaling', f'{name}, ms', 'small ResNet', '2', caption='Communication')
        for name in (V8, DDP)))]
    rows.append(_compared(['averaging 102 MB', '1', '2'], *(
        results.value('mean_grad', f'{name}, ms', 'ResNet-50, 102 MB', '2')
        for name in (V8, DDP))))
    rows += [_compared([f'averaging 102 MB, {rate} Gbit/s', hosts, ranks], *(
        results.value('hosts', f'{name}, ms', rate, hosts, ranks, caption='Gradients')
        for name in (V8, DDP)))
        for rate, hosts, ranks in [('1', '2', '1'), ('1', '4', '2')]]
    rows.append(_step(results, ['training step of ResNet-50, 1 Gbit/s', '2', '1'],
                      'ResNet-50', '2', '1'))
    return rows


def _checks(results: Results) -> list[list]:
    allreduce = 'allreduce of a float, µs'
    step = 'step of a perceptron, 1,000 units, ms'
    return [
        ['consistency check and all other overhead, compared with mpi4py', allreduce,
         *(results.value('collectives', f'{name}, µs', 'allreduce', caption='2 ranks')
           for name in (MPI4PY, V8)),
         results.value('collectives', f'{V8} / {MPI4PY}', 'allreduce', caption='2 ranks')],
        ['flight recorder', allreduce,
         *(results.value('recent', allreduce, way) for way in ('off', 'on (default)')),
         results.value('recent', 'ratio to off', 'on (default)')],
        ['timeline', step, *(results.value('timeline', column, step) for column in (
            'without a timeline', 'with a timeline', 'ratio'))],
        ['run record', step, *(
            results.value('run_record', column, 'perceptron, 1,000 units')
            for column in ('without a record, ms', 'with a record, ms', 'ratio'))]]
