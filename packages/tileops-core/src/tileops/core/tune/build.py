"""What the building process does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool

from tileops.core import program
from tileops.core.program import Recipe


def build(recipes: Sequence[Recipe], workers: int | None) -> Iterator[tuple[str, str | None]]:
    """Compile to disk what isn't there: the key of each recipe as it is done, with its failure.

    After a compiler that crashed, which takes all workers with it, the others are built one by one.
    """
    todo = {recipe.key: recipe for recipe in recipes}
    try:
        for recipe, failure in program.build(recipes, workers):
            del todo[recipe.key]
            yield recipe.key, failure
    except BrokenProcessPool:
        for key, recipe in todo.items():
            try:
                yield from ((key, failure) for _, failure in program.build([recipe], 1))
            except BrokenProcessPool:
                yield key, "its compiler crashed"
