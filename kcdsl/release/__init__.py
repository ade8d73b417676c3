"""Certificates of results: the triple of a contract, issuing, trust."""

OCI = "oci://"
"""The prefix of names in an OCI registry."""
