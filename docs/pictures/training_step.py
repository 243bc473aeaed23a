"""Draw docs/pictures/training_step.svg, the plot of README.md, from a benchmark.

``python docs/pictures/training_step.py`` needs matplotlib, and docs/benchmarks/training_step.txt.
"""

import pathlib
import re

import svg
from matplotlib.figure import Figure

HERE = pathlib.Path(__file__).resolve().parent
LINE = re.compile(r"(\S+) +1 rank: .*: ([\d.]+) \(.*?\) times, goal.*?; ([\d.]+) \(")


def draw() -> str:
    """Return a row of two bars for each model on one rank, as SVG."""
    text = HERE.with_name('benchmarks').joinpath('training_step.txt').read_text(encoding='utf-8')
    rows = [LINE.match(line).groups() for line in text.splitlines() if LINE.match(line)]
    models = [model for model, _, _ in rows]
    with_torch = [float(ratio) for _, ratio, _ in rows]
    without = [float(ratio) for _, _, ratio in rows]
    places = range(len(models))
    figure = Figure(figsize=(8, 3.4), layout='constrained')
    axes = figure.subplots()
    bars = [axes.barh([place - .2 for place in places], with_torch, .38, color='#0072b2',
                      label="ChainerMN 8 with PyTorch's kernels"),
            axes.barh([place + .2 for place in places], without, .38, color='#d55e00',
                      label='ChainerMN 8 without PyTorch')]
    for each in bars:
        axes.bar_label(each, fmt='%.1f', padding=3)
    axes.axvline(1, color='gray', linestyle='--', label='PyTorch')
    axes.set_yticks([*places], models)
    axes.invert_yaxis()
    axes.set_xlabel("time of a training step on a CPU, relative to PyTorch (less is better)")
    axes.legend(loc='lower right')
    axes.spines[['top', 'right']].set_visible(False)
    return svg.from_figure(figure)


if __name__ == '__main__':
    (HERE / 'training_step.svg').write_text(draw(), encoding='utf-8')
