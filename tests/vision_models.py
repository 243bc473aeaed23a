"""Converts Chainer's vision models with random weights, and compares them with Chainer.

``python tests/vision_models.py [--only TEXT] [--results FILE]
[--docs docs/test_results.md]``

Each conversion runs in a separate process, whose memory is measured. This needs several GB, onnx
and ONNX Runtime. With ``--results``, conversions that are already in the file are not repeated.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import platform
import resource
import subprocess
import sys
import tempfile
import time
from typing import Any

import chainer
import chainer.links as L
import numpy as np

import chainer_compat

MODELS = ('ResNet50Layers', 'ResNet101Layers', 'ResNet152Layers', 'VGG16Layers', 'VGG19Layers',
          'GoogLeNet')
MODES = ('inference', 'training', 'ONNX')
BEGIN, END = '<!-- written by vision_models.py -->', '<!-- until here -->'


def make(name: str, size: int = 224, batch: int = 2) -> tuple[Any, Any, Any]:
    """Return a model with activations near 1, the function to call, and its inputs."""
    model = getattr(L, name)(pretrained_model=None)
    random = np.random.default_rng(0)
    x = random.standard_normal((batch, 3, size, size), 'f')
    layers = ['prob', 'loss1_fc2', 'loss2_fc2'] if name == 'GoogLeNet' else ['prob']
    norms = [link for link in model.links() if isinstance(link, L.BatchNormalization)]
    for link in model.links():
        if isinstance(link, L.Convolution2D | L.Linear):
            link.W.array[...] = random.standard_normal(link.W.shape, 'f') * (
                2 / link.W.array[0].size) ** .5 * (.1 if len(link.W) == 1000 else 1)
    for link in norms:
        link.decay = 0.  # the next batch alone determines the statistics
    with chainer.using_config('train', True), chainer.no_backprop_mode():
        model(x)
    for link in norms:
        link.decay = .9
    return model, lambda x: model(x, layers), x


def convert(name: str, mode: str, **options: int) -> dict[str, float]:
    """Convert a model; return the largest relative differences, seconds and gigabytes."""
    model, call, x = make(name, **options)
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, 'model.onnx')
        began = time.perf_counter()
        if mode == 'ONNX':
            chainer_compat.to_onnx(model, file, x, dynamic_batch=True, call=call)
        else:
            module = chainer_compat.to_torch(
                model, x, train=mode == 'training', dynamic_batch=True, call=call)
        found = {'seconds': time.perf_counter() - began,
                 'gigabytes': resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6}
        if mode == 'ONNX':
            return {**found, 'outputs': with_onnx_runtime(file, call, x)}
    to_float64(model)  # deep networks with random weights amplify the rounding of float32
    result = chainer_compat.compare(model, module.double(), x.astype('d'), call=call)
    assert result.first_difference is None, result
    return {**found, **{each: max(getattr(result, each).values())
                        for each in ('functions', 'outputs', 'gradients')}}


def to_float64(model: Any) -> None:
    """Convert the parameters and statistics of a model to float64."""
    for parameter in model.params():
        parameter.cleargrad()
        parameter.array = parameter.array.astype('d')
    for link in model.links():
        for name in link._persistent:
            if isinstance(link.__dict__[name], np.ndarray):
                link.__dict__[name] = link.__dict__[name].astype('d')


def with_onnx_runtime(file: str, call: Any, x: Any) -> float:
    """Return the largest relative difference of outputs, for several batch sizes."""
    import onnxruntime

    from chainer_compat.pytorch.conversion.comparison import difference

    session = onnxruntime.InferenceSession(file)
    found = []
    for n in 1, 3:
        batch = np.concatenate([x] * n)[:n]
        with chainer.using_config('train', False):
            expected = call(batch).values()
        found += [difference(y, z.array) for y, z in zip(
            session.run(None, {'x': batch}), expected, strict=True)]
    return max(found)


def table(results: dict[str, dict[str, float]]) -> str:
    """Return the results in Markdown."""
    lines = ['| model | | functions | outputs | gradients | time | memory |',
             '|---|---|---|---|---|---|---|']
    for job, found in results.items():
        name, mode = job.split()
        numbers = [f'{found[each]:.0e}' if each in found else ''
                   for each in ('functions', 'outputs', 'gradients')]
        lines.append(f'| `{name}` | {mode} | {" | ".join(numbers)} | {found["seconds"]:.0f} s | '
                     f'{found["gigabytes"]:.1f} GB |')
    return '\n'.join(lines)


def versions() -> str:
    """Describe the date, the machine and the installed versions."""
    from importlib import metadata

    names = ', '.join(f'{name} {metadata.version(name)}'
                      for name in ('torch', 'onnx', 'onnxruntime', 'numpy'))
    threads = os.environ.get('OMP_NUM_THREADS', str(os.cpu_count()))
    return (f'Measured on {datetime.date.today()}; Linux {platform.release().split("-")[0]}, '
            f'Python {platform.python_version()}, {names}, '
            f'{threads} thread{"s" * (threads != "1")}.')


def main() -> None:
    """Run the missing conversions, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--only', default='', help='run conversions whose name contains this')
    parser.add_argument('--results', type=pathlib.Path, help='add the results to this JSON file')
    parser.add_argument('--docs', type=pathlib.Path, help='update the table in this page')
    parser.add_argument('--convert', nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.convert:
        print(json.dumps(convert(*args.convert)))
        return
    known = json.loads(args.results.read_text()) if args.results and args.results.exists() else {}
    for job in (f'{name} {mode}' for name in MODELS for mode in MODES):
        if job not in known and args.only in job:
            output = subprocess.run([sys.executable, __file__, '--convert', *job.split()],
                                    check=True, stdout=subprocess.PIPE, text=True).stdout
            known[job] = json.loads(output.splitlines()[-1])
            print(job, known[job], flush=True)
            if args.results:
                args.results.write_text(json.dumps(known, indent=1))
    order = [f'{name} {mode}' for name in MODELS for mode in MODES]
    text = table({job: known[job] for job in order if job in known})
    print(text)
    if args.docs:
        before, _, rest = args.docs.read_text().partition(BEGIN)
        args.docs.write_text(
            f'{before}{BEGIN}\n{text}\n\n{versions()}\n{END}{rest.partition(END)[2]}')


if __name__ == '__main__':
    main()
