"""Draw docs/pictures/training_step.svg, the plot of README.md, from a benchmark.

``python docs/pictures/training_step.py`` needs matplotlib, and docs/benchmarks/training_step.txt.
"""

import pathlib
import sys

import svg
from matplotlib.figure import Figure

HERE = pathlib.Path(__file__).resolve().parent
sys.path.append(str(HERE.parents[1] / 'benchmarks'))

import _tables  # noqa: E402
from _rounds import STYLES, TORCH, V8, WITHOUT_TORCH  # noqa: E402


def draw() -> str:
    """Return a row of two bars for each model on one rank, as SVG."""
    text = HERE.with_name('benchmarks').joinpath('training_step.txt').read_text(encoding='utf-8')
    table = _tables.tables(text)[0]
    models = [model for model, hosts, ranks, *_ in table.rows if hosts == ranks == '1']
    times = {name: [table.value(f'{name}, ms', model, '1', '1') for model in models]
             for name in (V8, WITHOUT_TORCH, TORCH)}
    with_torch, without = ([x / y for x, y in zip(times[name], times[TORCH], strict=True)]
                           for name in (V8, WITHOUT_TORCH))
    places = range(len(models))
    figure = Figure(figsize=(8, 3.4), layout='constrained')
    axes = figure.subplots()
    bars = [axes.barh([place - .2 for place in places], with_torch, .38, color=STYLES[V8][0],
                      label=V8),
            axes.barh([place + .2 for place in places], without, .38,
                      color=STYLES[WITHOUT_TORCH][0], label=WITHOUT_TORCH)]
    for each in bars:
        axes.bar_label(each, fmt='%.1f', padding=3)
    axes.axvline(1, color=STYLES[TORCH][0], linestyle='--', label=TORCH)
    axes.set_yticks([*places], models)
    axes.invert_yaxis()
    axes.set_xlabel("time of a training step on a CPU, relative to PyTorch (less is better)")
    axes.legend(loc='lower right')
    axes.spines[['top', 'right']].set_visible(False)
    return svg.from_figure(figure)


if __name__ == '__main__':
    (HERE / 'training_step.svg').write_text(draw(), encoding='utf-8')
