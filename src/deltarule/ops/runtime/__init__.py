"""What every Triton kernel is launched with: launchers, replays, compilation, the machine."""
