"""Save a grid of generated images."""

import pathlib

import chainer
import numpy as np
from PIL import Image


def draw_sheet(generator, rows=8, columns=8):
    """Make an extension that writes ``preview/<iteration>.png``, always from the same noise."""
    z = generator.noise(rows * columns)

    @chainer.training.make_extension()
    def draw(trainer):
        with chainer.using_config('train', False), chainer.no_backprop_mode():
            images = chainer.get_device('@numpy').send(generator(z).array)
        sheet = np.uint8((images + 1) * 127.5)
        _, channels, height, width = sheet.shape
        sheet = sheet.reshape(rows, columns, channels, height, width).transpose(0, 3, 1, 4, 2)
        sheet = sheet.reshape(rows * height, columns * width, channels)
        path = pathlib.Path(trainer.out, 'preview', f'{trainer.updater.iteration:06}.png')
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(sheet.squeeze()).save(path)

    return draw
