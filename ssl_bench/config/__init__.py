"""Study files and trials: strict, plain data. Imports no torch."""

from ssl_bench.config.catalog import CATALOG
from ssl_bench.config.study import SlurmSettings, StudySpec, load_study, parse_study
from ssl_bench.config.trial import ProtocolConfig, TrialConfig

__all__ = ["CATALOG", "ProtocolConfig", "SlurmSettings", "StudySpec", "TrialConfig", "load_study", "parse_study"]
