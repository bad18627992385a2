"""Where the data files of the package lie."""

from pathlib import Path

SPEC_DIR = Path(__file__).parent / "spec"
"""The tables, rules and model geometries that the package ships."""
