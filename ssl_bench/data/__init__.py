"""Datasets as fixed splits of stored images, and batches in a reproducible order."""

from ssl_bench.data.dataset import DATASETS, Dataset, data_root, load_dataset, register_dataset
from ssl_bench.data.loader import GlobalBatchLoader, PretrainDataModule
from ssl_bench.data.store import ImageStore

__all__ = [
    "DATASETS",
    "Dataset",
    "GlobalBatchLoader",
    "ImageStore",
    "PretrainDataModule",
    "data_root",
    "load_dataset",
    "register_dataset",
]
