"""In the place of SGLang's kernels, which no package index has for CPUs; SGLang computes by torch without.

Its modules want names to import; what is called says what is missing.
"""

from collections.abc import Callable


def __getattr__(name: str) -> Callable[..., object]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*arguments: object, **options: object) -> object:
        raise NotImplementedError(f"sgl_kernel.{name} is not here")

    return missing
