"""Arguments of an op for another number of samples."""

from hypothesis import given
from hypothesis import strategies as st

from autosplit.runtime.op_calls import odd_split, resizer


@given(st.integers(0, 2**40), st.integers(0, 2), st.integers(2, 4096), st.integers(2, 4096))
def test_a_size_is_told_by_what_the_samples_divide(factor, degree, first, second):
    odd = odd_split((first, second))
    sizes = resizer(odd, (first, second))
    if any(factor % n == 0 for n in (*odd, sum(odd))):
        factor += 1  # a constant that a batch size divides is ambiguous
    if all(factor % n for n in (*odd, sum(odd))):
        assert sizes(factor * odd[0] ** degree) == factor * first**degree
        assert sizes(factor * sum(odd) ** degree) == factor * (first + second) ** degree
