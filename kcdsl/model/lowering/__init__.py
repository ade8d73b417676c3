"""Block graphs from modules: torch.export, one handler per aten operation, rewrites, comparison.

`export` has the entry point; `calls` and `handlers` turn an exported program into `drafts`,
`rewrites` merge patterns into operations and mark attention, and `agreement` compares the graph
with the module.
"""

from kcdsl.model.lowering.evaluate import traced_format
from kcdsl.model.lowering.export import block_graph, converted

__all__ = ["block_graph", "converted", "traced_format"]
