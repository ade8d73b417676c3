"""Inference servers: questions, answers, and which tokens they mean."""
