"""Pretraining methods, one file each; found by scanning this folder."""

from ssl_bench.methods.base import METHODS, SSLMethod, register_method

__all__ = ["METHODS", "SSLMethod", "register_method"]
