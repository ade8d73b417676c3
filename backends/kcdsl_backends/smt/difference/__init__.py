"""How one contract differs from another: clause by clause, by models, and in their context."""
