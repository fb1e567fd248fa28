"""Implementations of the operators, a folder for each backend, a file for each stage."""
