"""Measure the harness on this machine against the bare floor."""
