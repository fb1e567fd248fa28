"""The commands that `deltarule` has in a checkout for its benchmarks."""

from bench.command import BenchRun, ModelBenchRun, bench, bench_model
from deltarule.cli import Command

COMMANDS = {
    "bench": Command("time the operators on a GPU beside their peers", BenchRun, bench),
    "bench model": Command("time training steps of a 1.3 B model", ModelBenchRun, bench_model),
}
