"""The reference semantics of contracts: what backends and translations are tested against."""
