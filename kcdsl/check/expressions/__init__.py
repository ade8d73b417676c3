"""Typing of expressions: from syntax trees to formulas, terms and predicates of the IR."""
