"""Atomic files, rows, aggregation, statistics, tables, plots and the report; no torch in here."""
