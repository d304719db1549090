"""Rounds played on clusters that nobody has to rent: `megatron-acco plan --simulate` (docs/PERFORMANCE.md)."""
