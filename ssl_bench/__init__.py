"""ssl_bench: an exact, fair and reproducible benchmark of self-supervised pretraining for images."""

__version__ = "0.1.0"
