"""Token tables: one row per token, possibly more than fit into memory."""
