"""Evaluation: bits per byte by length and position, the compressors beside them, and samples."""
