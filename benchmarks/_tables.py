"""The question that each benchmark answers, and the table of its main results."""

import re
import types
from collections.abc import Mapping
from typing import NamedTuple


class Table(NamedTuple):
    """How to find the rows of a table in the output of a benchmark."""

    question: str
    columns: list[str]
    row: str  # matches one row; its groups are cells
    group: str = ''  # matches the heading of a part of the output; its groups are the first cells
    labels: Mapping[str, str] = types.MappingProxyType({})  # texts to show for cells


TABLES = {
    'startup': Table(
        'How much time does ChainerMN add to the start of a program?',
        ['step', 'added milliseconds'],
        r'^(\w+) +clock +\+?([\d.-]+) ms',
        labels={'start': 'Python itself', 'import': '`import chainer`, patched',
                'chainermn': '`import chainermn`',
                'communicator': 'first `create_communicator`, 4 ranks'}),
    'collectives': Table(
        'How long does an operation on small data take, in microseconds?',
        ['ranks', 'operation', 'mpi4py', 'ChainerMN 8', 'ChainerMN 7'],
        r'^(\S[^\n]*?) +([\d.]+)' + r' +([\d.]+) \([\d.]+\)' * 2 + '$',
        r'^(\d+) ranks; load'),
    'scale': Table(
        'What does a rank cost in a job with many ranks, in milliseconds of CPU time?',
        ['', '`flat`', '`naive`', 'ChainerMN 7', 'mpi4py'],
        r'^(\S[^|\n]*?) {2,}([\d. ]+?)' + r' +\| +([\d. ]+?)' * 3 + '$'),
    'pipeline': Table(
        'How long does a step of a pipeline of two ranks take?',
        ['model', 'step of', 'compared with', 'times its time'],
        r'^(\w+): (1f1b|gpipe|interleaved|two halves) over ([^:]+): ([\d.]+) \('),
    'traffic': Table(
        'How many bytes does a rank receive for the consistency check of gradients?',
        ['ranks', 'counted', 'model', 'by collecting all signatures'],
        r'^ *([\d,]+) ranks +(?:([\d,]+) +)?([\d,]+) +([\d,]+)$'),
    'job_traffic': Table(
        'How many messages and bytes does a rank receive when a job starts or hangs?',
        ['at the rank that receives most', '2 ranks', '8', '32', '64', '256 (predicted)',
         '1,024 (predicted)', '4,096 (predicted)'],
        r'^((?:create|check|deadlock|stall warning|timeout)(?: bytes)?) +(?:([\d,]+) +([\d,]+) +)?'
        + ' +'.join([r'([\d,]+)'] * 5) + '$',
        labels={'create': 'first `create_communicator`, messages',
                'create bytes': 'first `create_communicator`, bytes',
                'check': 'consistency check of a barrier, messages',
                'check bytes': 'consistency check of a barrier, bytes',
                'deadlock': 'deadlock detection, messages',
                'deadlock bytes': 'deadlock detection, bytes',
                'stall warning': 'stall warning, messages',
                'stall warning bytes': 'stall warning, bytes',
                'timeout': 'report of a timeout, messages',
                'timeout bytes': 'report of a timeout, bytes'}),
    'recent': Table(
        'What does the flight recorder cost?',
        ['flight recorder', 'microseconds of an allreduce', 'ratio'],
        r'^(without|with|with sites) +([\d.]+) us(?: \(([\d.]+) times\))?$',
        labels={'without': 'off', 'with': 'on (default)', 'with sites': 'on, with call sites'}),
    'timeline': Table(
        'What does recording a timeline cost?',
        ['operation', 'microseconds without a timeline', 'ratio with a timeline'],
        r'^([^\n]+?) +([\d.]+) us; with a timeline ([\d.]+) times'),
    'run_record': Table(
        'What does recording a run cost?',
        ['training step', 'milliseconds without a record', 'ratio with a record'],
        r'^([^\n]+?) +([\d.]+) ms; with a record ([\d.]+) times'),
    'mean_grad': Table(
        'How many milliseconds does averaging gradients take on one node?',
        ['ranks', 'gradients', '`flat`', '`naive`', 'MPI_Allreduce', 'lower bound', 'ChainerMN 7',
         'PyTorch gloo'],
        r'flat +([\d.]+) ms.*?naive +([\d.]+) ms.*?raw +([\d.]+) ms.*?LB +([\d.]+) ms'
        r'.*?old naive +([\d.]+) ms(?:.*?gloo +([\d.]+) ms)?',
        r'^(\d+) ranks, (\w+): '),
    'cost_model': Table(
        'How many milliseconds would averaging 102 MB take on many nodes, by a model?',
        ['ranks', 'one MPI_Allreduce', 'communicator `flat`', 'ring, as in NCCL'],
        r'^(\d+) +([\d.]+) +([\d.]+) +([\d.]+)$'),
    'weak_scaling': Table(
        'How many milliseconds of a training step does communication take?',
        ['model', 'ranks', 'ChainerMN 8', 'ChainerMN 7', 'PyTorch DDP'],
        r'ours +step.*?lost +([\d.-]+).*?old +step.*?lost +([\d.-]+)'
        r'(?:.*?gloo +step.*?lost +([\d.-]+))?',
        r'^(\w+), (\d+) ranks; load'),
    'training_step': Table(
        'How many milliseconds does a training step take?',
        ['model', 'on', "Chainer with PyTorch's kernels", 'in them',
         'Chainer alone', 'PyTorch', 'memory of each, MB', 'Chainer in bfloat16',
         "PyTorch's autocast"],
        r"^(\S+) +(\d+ (?:ranks?|hosts)): with PyTorch's kernels +([\d.]+) ms"
        r"(?: \(([\d.]+) in them\))?(?:, with Chainer's +([\d.]+) ms)?(?:, PyTorch +([\d.]+) ms)?"
        r'[^\n]*?; memory ([\d, ]+) MB[^\n]*'
        r'(?:\n +in bfloat16: ([\d.]+) ms, autocast ([\d.]+) ms)?'),
    'functions': Table(
        'How long do functions take with PyTorch\'s kernels on the CPU, compared with Chainer\'s?',
        ['function', '32 x 64', '512 x 1,024'],
        r'^([a-z]\w*(?: \w+)*) +([\d.]+) +([\d.]+)$'),
    'updates': Table(
        'How many milliseconds does an optimizer need to update all parameters on the CPU?',
        ['update', 'Chainer', 'ChainerMN 8 without PyTorch', 'with PyTorch', 'PyTorch'],
        r'^(\w+, [^\n:]+): Chainer ([\d.]+) ms, NumPy ([\d.]+) ms, fused ([\d.]+) ms, '
        r'PyTorch ([\d.]+) ms$'),
    'overlap': Table(
        'How much communication time does overlap hide?',
        ['case', 'ranks', 'step without communication, ms', 'without overlap', 'with overlap'],
        r'^(\w[^\n]*?) +(\d+) ranks: a step without exchange +([\d.]+) ms, '
        r'without overlap +([\d.]+) ms, with overlap +([\d.]+) ms'),
    'sharded_states': Table(
        'How much memory and time do sharded states of Adam take?',
        ['', 'ranks', 'complete states', 'sharded states', 'ratio'],
        r'^([\w ]+?) +(\d+) ranks: complete +([\d.]+ \w+), sharded +([\d.]+); ([\d.]+)'),
    'scatter_dataset': Table(
        'How much time and memory does scattering a data set take?',
        ['data', 'ranks', 'order', 'ChainerMN 8, ms', 'ChainerMN 7, ms',
         'ChainerMN 8, memory / data', 'ChainerMN 7, memory / data'],
        r'^(\d+ MiB), (\d+) ranks, ([^\n]*?) +([\d.]+) ms, old +([\d.]+) ms.*?'
        r'peak memory ([\d.]+) x the data, old ([\d.]+)'),
    'iterator': Table(
        'How many milliseconds does a batch of the multi-node iterator take?',
        ['ChainerMN 8', 'ChainerMN 7', 'the underlying iterator alone'],
        r'(?:^a batch, \d+ ranks +([\d.]+) ms, old +([\d.]+) ms.*?)?'
        r'^ours against the iterator alone \(([\d.]+) ms\)'),
    'sharded_data': Table(
        'How fast does a process read from shards, and does that delay a training step?',
        ['reader', 'result'],
        r'^(\S[^\n]*?) {2,}([\d,.]+ (?:samples/s|times the step without a reader))',
        labels={'ours': 'ChainerMN 8', **{
            f'{kind} reader, {where}': f'a reader that {does} for 80 % of a step, in a {where}'
            for kind, does in (('waiting', 'waits'), ('Python', 'computes in pure Python'))
            for where in ('thread', 'process')}}),
    'checkpoint': Table(
        'How many milliseconds does saving a checkpoint delay training?',
        ['measured', 'ChainerMN 8', 'ChainerMN 7'],
        r'^(call|added to \d+ steps) +([\d.-]+) ms, old +([\d.-]+) ms',
        labels={'call': 'the call that saves'}),
    'kvstore_async': Table(
        'Does a slow rank delay the others with `dist_async`?',
        ['speed of the other ranks, relative to a run without a slow rank'],
        r'^others, with a slow rank against without: ([\d.]+)'),
    'gpu': Table(
        'How fast are gradients packed and unpacked on a GPU, in GB/s?',
        ['gradients', 'GB', 'pack', 'unpack', 'plain copy'],
        r'^(\S[^\n]*?) +([\d.]+) +(\d+) +(\d+) +(\d+)$'),
    'gpu_step': Table(
        'How long does a training step of ResNet-50 take on a GPU, in milliseconds?',
        ['kind', 'step', 'of which the host needs', 'images/s'],
        r'^(\S[^\n]*?) +([\d.]+) +([\d.]+) +(\d+)$'),
    'gpu_counts': Table(
        'How much work does exchanging gradients add to an update on a GPU?',
        ['gradients', 'exchange', 'version', 'launches', 'bytes to host', 'bytes to device',
         'bytes copied within', 'NCCL calls', 'NCCL bytes', 'host waits', 'allocations'],
        r'^(\S[^\n]*?)  +(\S[^\n]*?)  +(ChainerMN \d)' + r' +(-?[\d,]+)' * 8 + '$'),
    'hosts': Table(
        'How many milliseconds does averaging 102 MB take over the links between hosts?',
        ['hosts x ranks of each', 'link', '`flat`', 'lower bound', '`flat`, fp16', '`flat`, 2bit',
         'PyTorch gloo'],
        r'flat +([\d.]+) ms, bound +([\d.]+)(?:.*?flat, fp16 +([\d.]+) ms)?'
        r'(?:.*?flat, 2bit +([\d.]+) ms)?(?:.*?^ +gloo +([\d.]+) ms)?',
        r'^(\S+) at (\S+): '),
}


def table(name: str, output: str) -> str:
    """Return the main results of a benchmark as a Markdown table; '' if there are none."""
    found = TABLES[name]
    parts = [((), output)]
    if found.group:
        headings = [*re.finditer(found.group, output, re.M)]
        ends = [heading.start() for heading in headings] + [len(output)]
        parts = [(heading.groups(), output[heading.end():end])
                 for heading, end in zip(headings, ends[1:], strict=True)]
    rows = [(*first, *row.groups('')) for first, text in parts
            for row in re.finditer(found.row, text, re.M | re.S)]
    if not rows:
        return ''
    lines = [found.columns, ['---'] * len(found.columns),
             *([found.labels.get(cell, cell) for cell in row] for row in rows)]
    return ''.join(f'| {" | ".join(line)} |\n' for line in lines)
