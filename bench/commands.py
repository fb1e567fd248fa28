"""The commands that `deltarule` has in a checkout for its benchmarks."""

from bench.command import BenchRun, ModelBenchRun, bench, bench_model
from bench.whole import GenerateBenchRun, TrainBenchRun, bench_generate, bench_train
from deltarule.cli import Command

COMMANDS = {
    "bench": Command("time the operators on a GPU beside their peers", BenchRun, bench),
    "bench model": Command("time training steps of a 1.3 B model", ModelBenchRun, bench_model),
    "bench generate": Command("time generated tokens", GenerateBenchRun, bench_generate),
    "bench train": Command("time training steps", TrainBenchRun, bench_train),
}
