"""Names of the ways to decode, as rows and reports have them. Nothing here needs torch."""

EAGER = "transformers, eager"
GRAPH = "transformers, static cache and CUDA graph"
COMPILED = "transformers, static cache and torch.compile"
FUSED = "fused step"
FUSED_GRAPH = "fused step in a CUDA graph"
FUSED_INT8 = "fused step in a CUDA graph, int8 weights"

SHORT = {FUSED: "fused", FUSED_GRAPH: "fused", FUSED_INT8: "fused", COMPILED: "compile", GRAPH: "graph", EAGER: "eager"}
"""What narrow tables call them: the long names would leave a terminal of 80 characters no room for figures."""

MERGED = "packed linears of one input are one product there and dense ones are not, which is a part of x dense"
"""What is not alike where transformers' own forward decodes on a GPU."""


def loop_of(path: str) -> str:
    """The loop that a way runs: rates of different loops tell loops apart, and not weights."""
    return FUSED_GRAPH if path == FUSED_INT8 else path
