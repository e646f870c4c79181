"""What a load, a plan and a rehearsal have found out before anything is sharded."""

from __future__ import annotations

from dataclasses import dataclass

from zerostart.checkpoint.catalog import Catalog
from zerostart.engines import Engine
from zerostart.geometry.layout import Parallelism
from zerostart.loading.values import Values
from zerostart.models import Aliases, Built, Origins
from zerostart.recipe import Coverage, Recipes


@dataclass(frozen=True)
class Prepared:
    """All that is known of a load before anything is sharded; the same on every rank."""

    engine: Engine
    catalog: Catalog
    built: Built
    aliases: Aliases
    parallelism: Parallelism
    recipes: Recipes
    coverage: Coverage
    origins: Origins
    #: Whether there is a checkpoint.
    stored: bool = True
    #: What a module has given up for its shards; None where no module with values is sharded.
    values: Values | None = None
