"""Gather tensors if the processes have different numbers of rows. gloo would abort, so pad the tensors first."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.utils import gather, gather_object, recursively_apply

from autosplit.errors import InputError, shown


def gather_uneven(data: Any) -> Any:
    """Concatenate the rows of all processes, in the order of the processes.

    Args:
        data: A tensor, or a nested tuple, list or dict of tensors. A tensor without dimensions is one row.

    Raises:
        InputError: The tensors differ in sizes other than their number of rows. All processes raise it.
    """
    rows = recursively_apply(lambda tensor: tensor if tensor.dim() else tensor[None], data, error_on_other_type=True)
    own: list[list[int]] = []
    recursively_apply(lambda tensor: own.append([*tensor.shape]), rows)
    shapes: list[list[list[int]]] = gather_object([own])
    if all(other == own for other in shapes):
        return gather(rows)
    tails = [[shape[1:] for shape in other] for other in shapes]
    if any(other != tails[0] for other in tails):
        raise InputError(
            f"The processes gather tensors of the sizes {shown(shapes)}. Expected sizes that differ only in the "
            "first dimension. Pad them with accelerator.pad_across_processes(tensor, dim=1).",
        )
    sizes = iter([[shape[0] for shape in of_one] for of_one in zip(*shapes, strict=True)])
    return recursively_apply(lambda tensor: _gathered(tensor, next(sizes)), rows)


def without_rows(data: Any) -> Any:
    """Return the data with 0 rows, for a process whose rows must not be gathered."""
    try:
        return recursively_apply(
            lambda tensor: tensor[:0] if tensor.dim() else tensor[None][:0], data, error_on_other_type=True
        )
    except TypeError:  # a list of objects
        return []


def _gathered(tensor: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    most = max(sizes)
    padded = torch.cat([tensor, tensor.new_zeros(most - len(tensor), *tensor.shape[1:])])
    parts: torch.Tensor = gather(padded)
    return torch.cat([part[:size] for part, size in zip(parts.split(most), sizes, strict=True)])
