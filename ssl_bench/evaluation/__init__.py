"""Evaluation of frozen or fine-tuned backbones; blind to how they were pretrained."""

from ssl_bench.evaluation.context import EvaluationContext
from ssl_bench.evaluation.features import FeatureSet, cached_features, extract_features
from ssl_bench.evaluation.protocol import PROTOCOLS, Protocol, register_protocol

__all__ = [
    "PROTOCOLS",
    "EvaluationContext",
    "FeatureSet",
    "Protocol",
    "cached_features",
    "extract_features",
    "register_protocol",
]
