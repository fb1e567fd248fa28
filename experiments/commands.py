"""The commands that `deltarule` has in a checkout for the papers' experiments."""

from deltarule.cli import Command
from experiments.reproduce import ListRun, ReproduceRun, list_experiments, reproduce

COMMANDS = {
    "reproduce": Command("run an experiment of the papers", ReproduceRun, reproduce),
    "reproduce --list": Command("what each experiment shows and needs", ListRun, list_experiments),
}
