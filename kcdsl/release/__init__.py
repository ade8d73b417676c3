"""From results to certificates: the triple of a contract, issuing, trust."""
