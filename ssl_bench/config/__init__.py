"""Study files and trials: strict, plain data. Imports no torch."""

from ssl_bench.config.catalog import CATALOG, changed_versions
from ssl_bench.config.study import SlurmSettings, StudySpec, load_study, parse_study
from ssl_bench.config.trial import ProtocolConfig, TrialConfig

__all__ = [
    "CATALOG",
    "ProtocolConfig",
    "SlurmSettings",
    "StudySpec",
    "TrialConfig",
    "changed_versions",
    "load_study",
    "parse_study",
]
