"""The commands that `deltarule` has in a checkout for its benchmarks."""

from deltarule.cli import Command

COMMANDS = {
    "bench": Command("bench.command:bench", "time the operators, and other packages, on a GPU"),
    "bench model": Command("bench.command:bench_model", "time training steps of a 1.3 B model"),
    "bench generate": Command("bench.whole:bench_generate", "time generated tokens"),
    "bench train": Command("bench.whole:bench_train", "time training steps"),
}
