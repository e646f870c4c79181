"""Settings of hypothesis for all tests.

``make test`` always runs the same cases; a case that once failed is added to its test as an ``@example``.
``make nightly`` searches for new cases at random, in larger numbers. A failure there prints a line
(``@reproduce_failure``) that repeats its case.
"""

from hypothesis import HealthCheck, settings

#: Cases may share a fixture, because each overwrites the files of the one before it.
_SHARED = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
}
settings.register_profile("default", derandomize=True, **_SHARED)
settings.register_profile("search", print_blob=True, **_SHARED)
settings.load_profile("default")  # `pytest --hypothesis-profile search` loads the other profile


def count_examples(default: int, search: int | None = None) -> int:
    """Return ``default`` in ``make test``, and ``search`` (ten times as many) in a search."""
    if settings.get_current_profile_name() == "search":
        return 10 * default if search is None else search
    return default
