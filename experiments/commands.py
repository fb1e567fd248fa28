"""The commands that `deltarule` has in a checkout for the papers' experiments."""

from deltarule.cli import Command

COMMANDS = {
    "reproduce": Command(
        "run an experiment of the papers", "experiments.reproduce", "ReproduceRun", "reproduce"
    ),
    "reproduce --list": Command(
        "what each experiment shows and needs",
        "experiments.reproduce",
        "ListRun",
        "list_experiments",
    ),
}
