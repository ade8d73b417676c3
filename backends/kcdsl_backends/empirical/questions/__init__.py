"""Questions to the evidence table: plans, replays, aggregates and experiments."""
