"""Draw docs/pictures/training_step.svg, the plot of README.md, from a benchmark.

``python docs/pictures/training_step.py`` needs matplotlib, and docs/benchmarks/training_step.txt.
"""

import pathlib
import sys

import matplotlib
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
    with_torch, of_v8, of_without = (
        [table.value(column, model, '1', '1') for model in models]
        for column in (f'{V8} / {TORCH}', f'{V8}, ms', f'{WITHOUT_TORCH}, ms'))
    without = [ratio * x / y for ratio, x, y in zip(with_torch, of_without, of_v8, strict=True)]
    places = range(len(models))
    matplotlib.rcParams['font.size'] = 12
    figure = Figure(figsize=(5.5, 3.8), layout='constrained')
    axes = figure.subplots()
    bars = [axes.barh([place - .2 for place in places], with_torch, .38, color=STYLES[V8][0],
                      label=V8),
            axes.barh([place + .2 for place in places], without, .38,
                      color='#cccccc', label=WITHOUT_TORCH)]
    for each, digits in zip(bars, ('%.2f', '%.1f'), strict=True):
        axes.bar_label(each, fmt=digits, padding=6, fontsize='small',
                       bbox={'facecolor': 'white', 'edgecolor': 'none', 'pad': 1})
    line = axes.axvline(1, color=STYLES[TORCH][0], linestyle='--', label=TORCH)
    axes.set_yticks([*places], models)
    axes.invert_yaxis()
    axes.set_xlabel('time of a training step / PyTorch (less is better)')
    figure.legend(handles=[*bars, line], loc='outside upper center', ncols=2, frameon=False)
    axes.spines[['top', 'right']].set_visible(False)
    return svg.from_figure(figure)


if __name__ == '__main__':
    (HERE / 'training_step.svg').write_text(draw(), encoding='utf-8')
