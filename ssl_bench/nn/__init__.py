"""Backbones, heads and the parts methods share."""
