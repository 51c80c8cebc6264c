"""Make the embedded images: 10,000 train and 2,000 test, stratified from Fashion-MNIST with a fixed seed.

Usage: python scripts/make_fashion_mnist_mini.py [FOLDER]
FOLDER holds the four idx files, such as Debian's package dataset-fashion-mnist installs.
"""

import sys
from pathlib import Path

import numpy as np

from ssl_bench.data.datasets.fashion_mnist import DEBIAN_FOLDER, read_idx_folder

SEED = 2020
PER_CLASS = {"train": 1000, "test": 200}


def main() -> None:
    """Choose, write, and say how large the file is."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else DEBIAN_FOLDER
    arrays = {}
    for part, per_class in PER_CLASS.items():
        images, labels = read_idx_folder(folder, part)
        rng = np.random.Generator(np.random.PCG64(SEED))
        chosen = np.concatenate([rng.permutation(np.flatnonzero(labels == c))[:per_class] for c in range(10)])
        chosen.sort()
        arrays |= {f"{part}_images": images[chosen], f"{part}_labels": labels[chosen].astype(np.uint8)}
    target = Path(__file__).parent.parent / "ssl_bench" / "data" / "embedded" / "fashion_mnist_mini.npz"
    np.savez_compressed(target, **arrays)
    print(f"{target.name}: {target.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
