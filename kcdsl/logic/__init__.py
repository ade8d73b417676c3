"""Contracts in logic: relations of metrics, axioms, terms in an algebra, and SMT-LIB."""
