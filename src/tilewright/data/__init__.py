"""Data: arrays, folders of images, MNIST-format files, handwritten digits, augmentation and a prefetching loader.

A sample is `(x, y)` or `x`: an image is a (C, H, W) array, uint8 in 0..255 or float32, and a class label is an
int64. A batch is `(x, y)` of NumPy arrays, `x` of shape (N, C, H, W) and `y` int64 of shape (N,). Where the source
has its channels last (any decoded picture), so has the batch's memory: `x` is then a transposed view of an
(N, H, W, C) array, which the model takes without a copy.

Everything random draws from NumPy's Philox generator under the loader's seed, so that an epoch's batches depend on
the seed, the epoch and the sample alone: not on the number of threads, nor on where a run was resumed.
"""

from tilewright.data._random import BatchRandom
from tilewright.data.arrays import ArrayDataset
from tilewright.data.folder import ImageFolder, load_image
from tilewright.data.idx import mnist_files, read_idx
from tilewright.data.loader import Batches, Dataset, Loader, as_batches
from tilewright.data.samples import digits, mnist_5k
from tilewright.data.transforms import (
    CenterCrop,
    ColorJitter,
    Compose,
    Cutout,
    HorizontalFlip,
    Mixup,
    Normalize,
    RandomAffine,
    RandomCrop,
    RandomErasing,
    RandomResizedCrop,
    Resize,
    Transform,
)

__all__ = [
    "ArrayDataset",
    "BatchRandom",
    "Batches",
    "CenterCrop",
    "ColorJitter",
    "Compose",
    "Cutout",
    "Dataset",
    "HorizontalFlip",
    "ImageFolder",
    "Loader",
    "Mixup",
    "Normalize",
    "RandomAffine",
    "RandomCrop",
    "RandomErasing",
    "RandomResizedCrop",
    "Resize",
    "Transform",
    "as_batches",
    "digits",
    "load_image",
    "mnist_5k",
    "mnist_files",
    "read_idx",
]
