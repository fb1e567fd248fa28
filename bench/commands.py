"""The commands that `deltarule` has in a checkout for its benchmarks."""

from deltarule.cli import Command

COMMANDS = {
    "bench": Command(
        "time the operators on a GPU beside their peers", "bench.command", "BenchRun", "bench"
    ),
    "bench model": Command(
        "time training steps of a 1.3 B model", "bench.command", "ModelBenchRun", "bench_model"
    ),
    "bench generate": Command(
        "time generated tokens", "bench.whole", "GenerateBenchRun", "bench_generate"
    ),
    "bench train": Command("time training steps", "bench.whole", "TrainBenchRun", "bench_train"),
}
