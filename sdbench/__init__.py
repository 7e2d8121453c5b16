"""sdbench: do N:M pruned weights pay at decode time, on your own GPU and model?

Importing this package stays light: torch and transformers load only with the parts that need them.
"""

__version__ = "0.1.0"
