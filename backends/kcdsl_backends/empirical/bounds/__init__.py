"""Certified bounds of requests and blocks, which measured values must not exceed."""
