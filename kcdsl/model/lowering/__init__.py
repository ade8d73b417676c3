"""Block graphs from modules: torch.export, one handler per aten operation, rewrites, comparison.

`export` has the entry; `calls` and `handlers` turn what is exported into `drafts`, `rewrites` make
single operations of patterns and mark attention, and `agreement` runs the graph beside the module.
"""

from kcdsl.model.lowering.evaluate import traced_format
from kcdsl.model.lowering.export import block_graph, converted

__all__ = ["block_graph", "converted", "traced_format"]
