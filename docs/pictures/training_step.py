"""Draw docs/pictures/training_step.png, the plot of README.md, from a benchmark.

``python docs/pictures/training_step.py`` needs matplotlib, and docs/benchmarks/training_step.txt.
"""

import pathlib
import re

import matplotlib

matplotlib.use('Agg')

from matplotlib import pyplot

HERE = pathlib.Path(__file__).parent
LINE = re.compile(r"(\S+) +1 rank: .*: ([\d.]+) \(.*?\) times, goal.*?; ([\d.]+) \(")


def main() -> None:
    """Draw a row of two bars for each model on one rank."""
    text = HERE.with_name('benchmarks').joinpath('training_step.txt').read_text(encoding='utf-8')
    rows = [LINE.match(line).groups() for line in text.splitlines() if LINE.match(line)]
    models = [model for model, _, _ in rows]
    with_torch = [float(ratio) for _, ratio, _ in rows]
    without = [float(ratio) for _, _, ratio in rows]
    places = range(len(models))
    figure, axes = pyplot.subplots(figsize=(8, 3.4), layout='constrained')
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
    figure.savefig(HERE / 'training_step.png', dpi=120)


if __name__ == '__main__':
    main()
