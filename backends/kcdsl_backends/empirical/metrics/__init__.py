"""Metrics as pure functions; `measures` says what each of them is worth."""
