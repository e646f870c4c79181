"""Compare byte sets with Python sets of bytes."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.hypothesis_settings import count_examples
from zerostart.refit.image import ByteSet

Row = tuple[int, int, int, int]

#: Rows as tensors have them: a few strides, many of them alike, so that rows of one stride meet often.
row = st.tuples(
    st.integers(0, 200),
    st.integers(0, 12),
    st.sampled_from([0, 3, 8, 8, 8, 16, 16, 20, 33]),
    st.integers(0, 9),
)
rows = st.lists(row, max_size=12)


def bytes_of(rows: list[Row]) -> set[int]:
    return {
        start + n * stride + at
        for start, width, stride, count in rows
        for n in range(count)
        for at in range(width)
    }


def content(runs: ByteSet) -> set[int]:
    """Return the bytes of a set, and check its invariants."""
    table: list[Row] = [tuple(line) for line in runs.rows.tolist()]  # type: ignore[misc]
    actual = bytes_of(table)
    assert len(actual) == runs.nbytes, "a byte is there twice"
    assert [line[0] for line in table] == sorted(line[0] for line in table)
    assert all(
        width > 0 and (stride > width if count > 1 else stride == 0) for _, width, stride, count in table
    )
    assert runs.end == max(actual, default=-1) + 1
    spans = list(zip(runs.low.tolist(), runs.high.tolist(), strict=True))
    assert all(a[1] < b[0] for a, b in itertools.pairwise(spans))
    assert {byte for low, high in spans for byte in range(low, high)} == actual
    return actual


@settings(max_examples=count_examples(400), deadline=None)
@given(rows, rows, st.integers(0, 300), st.integers(0, 300))
def test_runs_are_sets_of_bytes(a: list[Row], b: list[Row], low: int, high: int) -> None:
    one, other = ByteSet.of(a), ByteSet.of(b)
    assert content(one) == bytes_of(a)
    assert content(one.intersect(other)) == content(other.intersect(one)) == bytes_of(a) & bytes_of(b)
    assert content(ByteSet.of([*a, *b])) == bytes_of(a) | bytes_of(b)
    assert content(one.within(low, high)) == {byte for byte in bytes_of(a) if low <= byte < high}
    assert content(one.minus(other)) == bytes_of(a) - bytes_of(b)
    assert content(ByteSet.of(one.rows.tolist())) == bytes_of(a)
