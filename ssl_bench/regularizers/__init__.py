"""Terms that a study adds to the loss of any method: "BYOL + T-REGS" is a row, not a file."""

from ssl_bench.regularizers.base import REGULARIZERS, AttachedRegularizer, Regularizer, regularized_loss

__all__ = ["REGULARIZERS", "AttachedRegularizer", "Regularizer", "regularized_loss"]
