"""Arguments of an op for another number of samples."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from autosplit.runtime.op_calls import OpCall, odd_split, resizer
from autosplit.runtime.op_cost import op_cost

aten = torch.ops.aten


@given(st.integers(0, 2**40), st.integers(0, 2), st.integers(2, 4096), st.integers(2, 4096))
def test_a_size_is_told_by_what_the_samples_divide(factor, degree, first, second):
    odd = odd_split((first, second))
    sizes = resizer(odd, (first, second))
    if any(factor % n == 0 for n in (*odd, sum(odd))):
        factor += 1  # a constant that a batch size divides is ambiguous
    if all(factor % n for n in (*odd, sum(odd))):
        assert sizes(factor * odd[0] ** degree) == factor * first**degree
        assert sizes(factor * sum(odd) ** degree) == factor * (first + second) ** degree


def test_a_product_costs_what_one_of_other_samples_does():
    def arguments(n):
        return torch.zeros(n, 7, 3), torch.zeros(n, 3, 5)

    def cost(n):
        return op_cost(aten.bmm.default, arguments(n), {}, torch.zeros(n, 7, 5))

    (odd,) = odd_split((2,))
    call = OpCall.of(aten.bmm.default, arguments(odd), {}, torch.zeros(odd, 7, 5), "forward")
    for n in (2, 31, 4096):
        assert call.costs(resizer((odd,), (n,))) == cost(n)
