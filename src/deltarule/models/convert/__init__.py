"""Checkpoints of other projects: their names, their options, and the way in both directions."""
