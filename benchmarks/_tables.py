"""Title and question of each benchmark, and the tables in its output."""

import re
from typing import NamedTuple


class Section(NamedTuple):
    """A section of the page."""

    title: str
    question: str
    note: str = ''

    @property
    def anchor(self) -> str:
        """Return the anchor of the title on the page."""
        return re.sub(r'[^\w\- ]', '', self.title.lower()).replace(' ', '-')


class Table(NamedTuple):
    """A table in the output of a benchmark."""

    caption: str
    columns: list[str]
    rows: list[list[str]]

    def value(self, column: str, *start: str) -> int | float | None:
        """Return a number of the first row that starts with some cells; None if it is missing."""
        for row in self.rows:
            if row[:len(start)] == list(start) and column in self.columns:
                text = row[self.columns.index(column)].replace(',', '')
                return (float(text) if '.' in text else int(text)) if text else None
        return None


SECTIONS = {
    'startup': Section(
        'Startup time', 'How much time does ChainerMN add to the start of a program?'),
    'collectives': Section(
        'Latency of operations', 'How long does an operation on small data take?',
        'Includes the consistency check and the flight recorder of ChainerMN 8.'),
    'scale': Section(
        'Jobs with many ranks', 'What does a rank cost in a job with many ranks?',
        'All ranks share the cores of one machine. ChainerMN 8 uses the communicator `flat`, '
        'unless the heading says `naive`. mpi4py sends the same messages, without a model.'),
    'traffic': Section(
        'Bytes of the consistency check',
        'How many bytes does a rank receive for the consistency check?'),
    'job_traffic': Section(
        'Messages when a job starts or hangs',
        'How many messages and bytes does a rank receive when a job starts or hangs?',
        'create: the first `create_communicator`; check: the consistency check of a barrier; '
        'deadlock, stall warning and timeout: their detection and report.'),
    'recent': Section('Flight recorder', 'What does the flight recorder cost?'),
    'timeline': Section('Timeline', 'What does recording a timeline cost?'),
    'run_record': Section('Record of a run', 'What does recording a run cost?'),
    'mean_grad': Section(
        'Averaging gradients on one node', 'How long does averaging gradients take on one node?',
        'ChainerMN 8 uses the communicator `flat`, unless the heading says `naive`. mpi4py: one '
        '`MPI_Allreduce` without packing. Lower bound: reading and writing each gradient once.'),
    'cost_model': Section(
        'Predicted averaging on many nodes',
        'How long would averaging 102 MB take on up to 1,024 ranks, according to a model?',
        'ChainerMN 8 uses the communicator `flat`; mpi4py: packing and one `MPI_Allreduce`.'),
    'weak_scaling': Section(
        'Weak scaling on one node', 'How much of a training step is communication?',
        'Each rank has its own batch, so the work grows with the ranks. Ranks beyond the number of '
        'cores share them.'),
    'training_step': Section(
        'Training step on a CPU', 'How long does a training step take?',
        'PyTorch: the fastest of its defaults, fused optimizers with channels last, and '
        '`torch.compile`; on several ranks, DDP. The two nodes are virtual hosts with a link of '
        '1 Gbit/s. "PyTorch kernels alone" was measured with a profiler, whose overhead is '
        'included; it can therefore exceed the step time.'),
    'functions': Section(
        'Functions with PyTorch kernels',
        'How long do functions take with PyTorch\'s kernels on the CPU, relative to Chainer\'s?'),
    'updates': Section(
        'Optimizer updates', 'How long does an optimizer take to update all parameters on the CPU?',
        'ChainerMN 7: the update rules of Chainer, a parameter at a time.'),
    'pipeline': Section(
        'Pipeline parallelism', 'How long does a step of a pipeline of two ranks take?',
        'Sleeping layers wait instead of computing, like a rank with a GPU.'),
    'overlap': Section(
        'Overlap of communication', 'How much communication time does overlap hide?',
        'slowed: simulated network, as slow as the backward pass. nodes: two nodes with a link of '
        '1 Gbit/s. shared: all cores compute, so overlap has no benefit. watching: only the '
        'overhead.'),
    'sharded_states': Section(
        'Sharded optimizer states', 'How much memory and time do sharded states of Adam take?'),
    'scatter_dataset': Section(
        'Scattering a dataset', 'How much time and memory does scattering a dataset take?'),
    'iterator': Section(
        'Multi-node iterator', 'How long does a batch of the multi-node iterator take?'),
    'sharded_data': Section(
        'Reading sharded data',
        'How fast does a process read from shards, and does that delay a training step?'),
    'checkpoint': Section('Checkpoints', 'How long does saving a checkpoint delay training?'),
    'kvstore_async': Section(
        'Asynchronous KVStore', 'Does a slow rank delay the others with `dist_async`?'),
    'gpu': Section('Packing gradients on a GPU', 'How fast are gradients packed on a GPU?'),
    'gpu_step': Section(
        'Training step on a GPU', 'How long does a training step of ResNet-50 take on a GPU?',
        'Host: the time until `update` returns, before the GPU has finished.'),
    'gpu_counts': Section(
        'GPU calls of an update',
        'How much work does exchanging gradients add to an update on a GPU?',
        'Counted on the virtual GPU. A negative number is work that ChainerMN saves.'),
    'hosts': Section(
        'Averaging gradients between nodes',
        'How long does averaging 102 MB take over the links between nodes?',
        'The nodes are virtual hosts (network namespaces) and share the cores of this machine. '
        'Lower bound: the bytes of uncompressed gradients at full speed of the link.'),
}

#: The parts of the page, with their sections in order.
GROUPS = {
    'Communication': ('collectives', 'mean_grad', 'hosts', 'cost_model', 'scale', 'traffic'),
    'Training steps': ('training_step', 'gpu_step', 'weak_scaling', 'overlap', 'pipeline',
                       'kvstore_async', 'functions', 'updates', 'gpu', 'gpu_counts'),
    'Memory and data': ('sharded_states', 'checkpoint', 'scatter_dataset', 'iterator',
                        'sharded_data'),
    'Startup and diagnosis': ('startup', 'job_traffic', 'recent', 'timeline', 'run_record'),
}

#: The unit at the end of a heading.
UNIT = re.compile(', (ms|µs|MB|steps/s)$')

#: Of each title, the name of the benchmark.
NAMES = {section.title: name for name, section in SECTIONS.items()}


def tables(output: str) -> list[Table]:
    """Find the tables in an output, by the dashes under their headings."""
    lines = output.splitlines()
    found = []
    for n, line in enumerate(lines):
        if n and re.fullmatch(r'-+(?:  -+)+', line):
            spans = [match.span() for match in re.finditer('-+', line)]
            rows = [lines[n - 1]]
            for row in lines[n + 1:]:
                if not row:
                    break
                rows.append(row)
            columns, *cells = [[row[start:end].strip() for start, end in spans] for row in rows]
            found.append(Table(lines[n - 2] if n > 1 else '', columns, cells))
    return found


def _is_number(cell: str) -> bool:
    return re.fullmatch(r'-?[\d,.]+%?', cell) is not None


def markdown(table: Table) -> str:
    """Return a table of the page, below its caption, without empty columns.

    If several columns have the same unit, it is part of the caption.
    """
    columns = [column for column in zip(table.columns, *table.rows, strict=True)
               if any(column[1:]) or not table.rows]
    headings = [column[0] for column in columns]
    units = [match[1] for match in map(UNIT.search, headings) if match]
    caption = table.caption
    if len(units) > 1 and len(set(units)) == 1:
        headings = [UNIT.sub('', heading) for heading in headings]
        start = f'{caption}, in' if caption else 'Times in' if units[0] in ('ms', 'µs') else 'In'
        caption = f'{start} {units[0].replace("steps/s", "steps per second")}'
    marks = ['---:' if all(map(_is_number, filter(None, column[1:]))) else '---'
             for column in columns]
    rows = [headings, marks, *zip(*(column[1:] for column in columns), strict=True)]
    return (f'{caption}:\n\n' if caption else '') + ''.join(
        f'| {" | ".join(row)} |\n' for row in rows)
