"""The commands that `deltarule` has in a checkout for the papers' experiments."""

from deltarule.cli import Command

COMMANDS = {
    "reproduce": Command("experiments.reproduce:reproduce", "run an experiment of the papers"),
    "reproduce --list": Command(
        "experiments.reproduce:list_experiments", "what each experiment shows and needs"
    ),
}
