"""Inference servers: requests, replies, and the ids of their tokens."""
