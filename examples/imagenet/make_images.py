"""Generate a small image dataset with the usual layout of ImageNet: folders and label lists.

The label lists images/train.txt and images/val.txt have lines such as "train/07/031.jpg 7". The
images are noisy stripes; their direction and color determine the class.
"""

import argparse
import colorsys
import pathlib

import numpy as np
from PIL import Image


def draw(label, n_classes, size, random):
    """Return an image of the class, as (height, width, RGB) from 0 to 255."""
    angle = np.pi * label / n_classes
    row, column = np.mgrid[:size, :size] / size
    across = row * np.cos(angle) + column * np.sin(angle)
    wave = np.sin(20 * across + random.uniform(0, 2 * np.pi))
    color = np.array(colorsys.hsv_to_rgb((label * 0.4) % 1, 0.5, 1))
    noisy = (0.5 + 0.3 * wave)[..., None] * color + random.normal(0, 0.15, (size, size, 3))
    return np.uint8(noisy.clip(0, 1) * 255)


def main():
    """Write the images of training and validation."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument('--out', default='images', help='folder to write to')
    parser.add_argument('--classes', type=int, default=10)
    parser.add_argument('--train', type=int, default=40, help='training images per class')
    parser.add_argument('--val', type=int, default=10, help='validation images per class')
    parser.add_argument('--size', type=int, default=64, help='pixels per side')
    args = parser.parse_args()

    random = np.random.RandomState(0)
    out = pathlib.Path(args.out)
    for name, n in ('train', args.train), ('val', args.val):
        lines = []
        for label in range(args.classes):
            folder = pathlib.Path(name, f'{label:02}')
            (out / folder).mkdir(parents=True, exist_ok=True)
            for i in range(n):
                path = folder / f'{i:03}.jpg'
                Image.fromarray(draw(label, args.classes, args.size, random)).save(out / path)
                lines.append(f'{path} {label}\n')
        (out / f'{name}.txt').write_text(''.join(lines))
        print(f'{len(lines)} images are listed in {out / name}.txt')


if __name__ == '__main__':
    main()
