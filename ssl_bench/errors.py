"""Exceptions of ssl_bench.

SSLBenchError
├── ConfigError              a study, recipe or argument is wrong (also a ValueError)
├── RegistryError            an unknown or clashing plug-in name (also a LookupError)
├── DataError                images or labels cannot be used as given (also a ValueError)
├── StoreError               a file of the harness is missing, torn or from another version
├── IncompatibleTrialError   a stored trial does not fit what is asked of it
└── TrainingError            a run cannot go on
    ├── DivergedError        the loss became NaN or infinite
    ├── CollapsedError       the embedding became constant
    └── InterruptedRunError  a signal asked to stop; the checkpoint is written

Every message says what must hold, what was got, where, and what to do next.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SSLBenchError(Exception):
    """Base of every error raised on purpose by ssl_bench."""


class ConfigError(SSLBenchError, ValueError):
    """A study file, recipe or argument does not describe something that can run."""


class RegistryError(SSLBenchError, LookupError):
    """A plug-in name is unknown, or two plug-ins claim the same name."""


class DataError(SSLBenchError, ValueError):
    """Images, labels or splits cannot be used as given."""


class StoreError(SSLBenchError):
    """A file written by the harness is missing, torn, or from another version."""


class IncompatibleTrialError(SSLBenchError):
    """A stored trial does not fit the request; `reason` says which part differs."""

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class TrainingError(SSLBenchError):
    """A training run cannot go on; `step` is the optimizer step at which it stopped."""

    def __init__(self, message: str, *, step: int) -> None:
        super().__init__(message)
        self.step = step

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_training_error, (type(self), str(self), self.step)


def _rebuild_training_error(cls: type[TrainingError], message: str, step: int) -> TrainingError:
    return cls(message, step=step)


class DivergedError(TrainingError):
    """The loss became NaN or infinite."""


class CollapsedError(TrainingError):
    """The embedding became constant over the images."""


class InterruptedRunError(TrainingError):
    """A signal asked the run to stop; it saved a checkpoint and can go on from there."""

    def __init__(self, message: str, *, step: int, signal_number: int) -> None:
        super().__init__(message, step=step)
        self.signal_number = signal_number


def did_you_mean(name: str, available: Iterable[str]) -> str:
    """Return the tail of an error about an unknown name: the nearest valid one and the list."""
    names = sorted(available)
    close = difflib.get_close_matches(name, names, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"{hint} Available: {', '.join(names) or 'none'}."
