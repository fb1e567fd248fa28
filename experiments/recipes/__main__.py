"""Print the tables of docs/recipes.md: patterns, recipes, and what is not known about them."""

from experiments.recipes.table import patterns, recipes, unknowns

if __name__ == "__main__":
    print(patterns(), recipes(), unknowns(), sep="\n\n")
