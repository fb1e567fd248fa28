"""Training: documents, packed batches, optimizer, checkpoints, the loop, and its runs."""
