"""Certified bounds of requests and blocks, which what was measured must not exceed."""
