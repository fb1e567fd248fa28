"""The papers' experiments: one file each, run by `deltarule reproduce NAME`."""
