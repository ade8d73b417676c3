"""Names of the arrays that a request records, from which metrics are formed.

A metric per token or per request is recorded under its own name; these are the others.
"""

LOGITS = ("train_logits", "infer_logits")
"""Logits [T, V] of both kernels, read by one pass over all of them; never kept."""
STATES = ("train_hidden", "infer_hidden")
"""Last hidden states [T, D] of both kernels; never kept."""
TOPS = ("train_top", "infer_top")
"""Ids [T, k] of the likeliest tokens of both kernels, likeliest first; never kept."""
LISTS = ("train_top_logs", "infer_top_logs")
"""ln p and ln q [T, m] of the tokens that both sides list; never kept."""
LOGS = TRAIN_LOG, INFER_LOG = ("sampled_train_log", "sampled_infer_log")
"""ln p and ln q of the sampled tokens."""
RATIO_LOG = "log_ratio"
"""ln w of the sampled tokens: the metric of this name."""
CONFIDENCES = ("ece_train", "ece_train_right", "ece_infer", "ece_infer_right")
"""Of each labelled position [T]: the probability of the likeliest token of both kernels, and 1
where it is the label."""
RANKED = ("ace_train", "ace_train_hits", "ace_infer", "ace_infer_hits")
"""Flattened [T, 5] arrays: probabilities of the five likeliest tokens, and which is the label."""
LENGTHS = "rollout_lengths"
"""Counted tokens of each rollout of a request, in the order of its arrays."""
ADVANTAGE_WEIGHTED = "advantage_weighted"
"""(w - 1) A of each counted token."""
SHARED_ROUTES, LAYERS, REROUTED = "shared_routes", "routed_layers", "rerouted"
"""Shares of chosen experts that both sides share, token by token [tokens x layers]; how many layers
each rollout has; 1 for each token that was rerouted in any layer."""
GRADIENTS = ("train_gradient", "infer_gradient", "gradient_width")
"""Gradients of each rollout, one after the other, and how many numbers each of them has."""
CACHE = "cache_bytes"
"""Bytes of keys and values of each rollout."""
