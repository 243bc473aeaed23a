"""Compute the mean of all training images, in parallel."""

import argparse

import chainer
import numpy as np

import chainermn


def main():
    """Read the images and write their mean, an array of shape (channels, height, width)."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument('train', nargs='?', default='images/train.txt',
                        help='list of image files and labels')
    parser.add_argument('--root', default='images',
                        help='folder that the listed paths are relative to')
    parser.add_argument('--out', default='mean.npy')
    args = parser.parse_args()

    comm = chainermn.create_communicator('naive')
    images = chainer.datasets.LabeledImageDataset(args.train, args.root)
    # Every process can read every file, so it only needs to know which files to read.
    begin, end = chainermn.scatter_index(len(images), comm, force_equal_length=False)
    total = np.zeros_like(images[0][0], np.float64)
    for i in range(begin, end):
        total += images[i][0]
    mean = comm.allreduce(total) / len(images)
    if comm.rank == 0:
        np.save(args.out, mean.astype(np.float32))
        print(f'{args.out}: the mean of {len(images)} images, shape {mean.shape}')


if __name__ == '__main__':
    main()
