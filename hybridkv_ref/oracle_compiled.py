"""The rows of a compiled oracle. Nothing is compiled here; ``native`` writes this module from the tables."""

from hybridkv_ref.oracle_row import Row

ROWS: dict[str, type[Row]] = {}
"""The class of each row, by the row's text."""
