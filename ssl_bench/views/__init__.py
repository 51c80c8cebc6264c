"""Batched, per-sample random views on the device."""

from ssl_bench.views.pipeline import ViewPipeline, ViewSpec
from ssl_bench.views.recipes import VIEW_RECIPES, build_views

__all__ = ["VIEW_RECIPES", "ViewPipeline", "ViewSpec", "build_views"]
