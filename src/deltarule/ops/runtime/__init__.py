"""What kernels are launched with: launchers, replays, captures, compilation, the machine."""
