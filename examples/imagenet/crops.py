"""Data loading: open an image file, crop it to a square, and scale its values."""

import chainer
import numpy as np


class Crops(chainer.dataset.DatasetMixin):
    """Square crops of labeled images.

    Args:
        images: Dataset of images, (3, height, width) with values from 0 to 255, and labels.
        mean: Array that is subtracted from each image, such as their mean.
        size: Pixels per side; the images are at least as large.
        random: Whether to crop at a random position and mirror half of the images, for training.
            Otherwise, crop the center, for validation.
        dtype: Dtype of the crops.
    """

    def __init__(self, images, mean, size, random, dtype):
        self.images = images
        self.mean = mean
        self.size = size
        self.random = random
        self.dtype = dtype

    def __len__(self):
        return len(self.images)

    def get_example(self, i):
        image, label = self.images[i]
        _, height, width = image.shape
        if self.random:
            top = np.random.randint(height - self.size + 1)
            left = np.random.randint(width - self.size + 1)
        else:
            top, left = (height - self.size) // 2, (width - self.size) // 2
        image = (image - self.mean)[:, top:top + self.size, left:left + self.size]
        if self.random and np.random.randint(2):
            image = image[:, :, ::-1]
        return (image / 128).astype(self.dtype), label
