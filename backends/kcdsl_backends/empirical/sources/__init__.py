"""Sources of evidence: local kernels, servers, recorded rollouts and logits, token tables."""
