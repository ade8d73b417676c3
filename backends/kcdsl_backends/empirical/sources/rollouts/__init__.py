"""Recorded rollouts and logits: files, columns, sampling units, and the metrics of one rollout."""
