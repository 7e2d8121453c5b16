"""Runs as one self-contained HTML file: tables, plots and what was run."""
