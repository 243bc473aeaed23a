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
        """Return a number from the first row that starts with these cells, or None."""
        for row in self.rows:
            if row[:len(start)] == list(start) and column in self.columns:
                text = row[self.columns.index(column)].replace(',', '')
                return (float(text) if '.' in text else int(text)) if text else None
        return None


SECTIONS = {
    'startup': Section(
        'Startup time', 'How much time does ChainerMN add to the start of a script?'),
    'collectives': Section(
        'Latency of operations', 'How long does an operation on small data take?',
        'The times of ChainerMN 8 include its consistency check and its flight recorder.'),
    'scale': Section(
        'Jobs with many ranks',
        'How much CPU time and memory does each rank need in a job with many ranks?',
        'All ranks share the cores of one machine. ChainerMN 8 uses the communicator `flat`, '
        'unless the column heading says `naive`. mpi4py sends the same messages, without a model.'),
    'traffic': Section(
        'Bytes of the consistency check',
        'How many bytes does a rank receive for the consistency check?'),
    'job_traffic': Section(
        'Messages when a job starts or hangs',
        'How many messages and bytes does a rank receive when a job starts or hangs?',
        '"create" is the first call of `create_communicator`, and "check" is the consistency check '
        'of a barrier. "deadlock", "stall warning" and "timeout" include detection and report.'),
    'recent': Section('Flight recorder', 'How much time does the flight recorder add?'),
    'timeline': Section('Timeline', 'How much time does recording a timeline add?'),
    'run_record': Section('Run record', 'How much time does recording a run add?'),
    'mean_grad': Section(
        'Averaging gradients on one node', 'How long does averaging gradients take on one node?',
        'ChainerMN 8 uses the communicator `flat`, unless the column heading says `naive`. mpi4py '
        'calls `MPI_Allreduce` once, without packing. The lower bound is the time to read and '
        'write each gradient once.'),
    'cost_model': Section(
        'Predicted averaging on many nodes',
        'How long would averaging 102 MB take on up to 1,024 ranks, according to a model?',
        'ChainerMN 8 uses the communicator `flat`. mpi4py packs the gradients and calls '
        '`MPI_Allreduce` once.'),
    'weak_scaling': Section(
        'Weak scaling on one node', 'How much of a training step is communication?',
        'Each rank has its own batch, so the total work grows with the number of ranks. If there '
        'are more ranks than cores, the ranks share the cores.'),
    'training_step': Section(
        'Training step on a CPU', 'How long does a training step take?',
        'The columns for PyTorch show the fastest of three variants: the defaults, fused '
        'optimizers with channels last, and `torch.compile`. On several ranks, PyTorch uses DDP. '
        'The two nodes are virtual hosts with a link of 1 Gbit/s. "PyTorch kernels alone" includes '
        'the overhead of a profiler, so it can exceed the step time.'),
    'functions': Section(
        'Functions with PyTorch kernels',
        'How long do functions take with PyTorch\'s kernels on the CPU, compared with Chainer\'s?'),
    'updates': Section(
        'Optimizer updates', 'How long does an optimizer take to update all parameters on the CPU?',
        'ChainerMN 7 uses Chainer\'s update rules, which update one parameter at a time.'),
    'pipeline': Section(
        'Pipeline parallelism', 'How long does a step of a pipeline of two ranks take?',
        'Sleeping layers wait instead of computing, as a rank does while its GPU computes.'),
    'overlap': Section(
        'Overlap of communication', 'How much communication time does overlap hide?',
        '"slowed" simulates a network that takes as long as the backward pass. "nodes" uses two '
        'nodes with a link of 1 Gbit/s. In "shared", all cores compute, so overlap has no benefit; '
        '"shared always" uses `overlap=\'always\'`. "watching" measures only the overhead.'),
    'sharded_states': Section(
        'Sharded optimizer states', 'How much memory and time does Adam need with sharded states?'),
    'scatter_dataset': Section(
        'Scattering a dataset', 'How much time and memory does scattering a dataset take?'),
    'iterator': Section(
        'Multi-node iterator', 'How long does the multi-node iterator take to return a batch?'),
    'sharded_data': Section(
        'Reading sharded data',
        'How fast does a process read from shards, and does reading delay a training step?',
        'In the second table, each reader takes 80% of the time of a step.'),
    'checkpoint': Section('Checkpoints', 'How long does saving a checkpoint delay training?'),
    'kvstore_async': Section(
        'Asynchronous KVStore', 'Does a slow rank delay the other ranks with `dist_async`?'),
    'gpu': Section('Packing gradients on a GPU', 'How fast are gradients packed on a GPU?'),
    'gpu_step': Section(
        'Training step on a GPU', 'How long does a training step of ResNet-50 take on a GPU?',
        'The host time is the time until `update` returns, before the GPU has finished.'),
    'gpu_counts': Section(
        'GPU calls per update',
        'How much work does averaging gradients add to an update on a GPU?',
        'These numbers were counted on the virtual GPU. A negative number is work that ChainerMN '
        'saves.'),
    'hosts': Section(
        'Averaging gradients between nodes',
        'How long does averaging 102 MB take over the links between nodes?',
        'The nodes are virtual hosts (network namespaces) that share the cores of this machine. '
        'The lower bound is the time to send the uncompressed gradients at the full speed of the '
        'link.'),
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

#: Matches the unit at the end of a heading.
UNIT = re.compile(', (ms|µs|MB|steps/s)$')

#: The name of the benchmark for each title.
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
