"""From results to certificates: the triple of a contract, issuing, trust."""

OCI = "oci://"
"""How the name of what is in an OCI registry begins."""
