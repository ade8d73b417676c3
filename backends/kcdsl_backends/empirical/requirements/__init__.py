"""Requirements: what clauses read, which slices they speak of, and what budgets they allow."""
