"""Figures: one style for all of them, one file for each."""
