"""Count the samples of a wrapper's calls. See Note [What is cut] in `autosplit.workload.batch_layout`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from autosplit.errors import WorkloadError, warn_user
from autosplit.parallel.gather import AmbiguousBatchWarning
from autosplit.text import listed
from autosplit.workload.batch_layout import AmbiguousBatchError, BatchLayout, EarlierBatches, read
from autosplit.workload.tree import Node


@dataclass
class CallReader:
    """Read the calls of one wrapper. Earlier calls decide what a part contains that may be read in two ways."""

    dim: int
    earlier: EarlierBatches = field(default_factory=EarlierBatches)

    def read(self, inputs: tuple[Any, ...], kwargs: dict[str, Any], expected: int | None) -> BatchLayout:
        """Return the layout of a call. Without a tensor to cut, it has 0 samples.

        Args:
            expected: The number of samples of a full batch. Without gradients, it does not decide about the reading,
                because an evaluation may have batches of any size.

        Raises:
            WorkloadError: The samples cannot be counted.
        """
        root = Node.of_call(inputs, kwargs)
        if not any(node.value.dim() > self.dim for node in root.tensors):
            return BatchLayout(root, 0, self.dim)
        try:
            layout = read(root, self.dim, self.earlier, expected if torch.is_grad_enabled() else None)
        except AmbiguousBatchError as error:
            warn_user(f"{error} It was cut into {error.rows} samples.", AmbiguousBatchWarning)
            layout = BatchLayout(root, error.rows, self.dim, self.earlier)
        except WorkloadError as error:
            raise WorkloadError(
                f"{self._rows_text(root)}: {error}. A batch that cannot be cut trains on one device or with DDP "
                "(strategy='ddp')",
            ) from error
        else:
            if layout.size == expected and not self.earlier.lists:
                self._learn_lists(layout)
        self.earlier.record(layout)
        return layout

    def _learn_lists(self, layout: BatchLayout) -> None:
        """Record which lists of tensors contain samples. Warn of lists of n tensors with n rows each."""
        for node in layout.root.all():
            items = node.children or ()
            if node.extent(self.dim) is None or not items or not node.tensors:
                continue
            self.earlier.lists[node.key] = is_list = node.place in layout.lists
            if is_list or layout.size == 1 or len(items) != layout.size or not all(map(layout.is_cut, items)):
                continue
            if len({(item.value.shape, item.value.dtype) for item in items}) == 1:
                warn_user(
                    f"The batch has a list of {layout.size} tensors, each with {layout.size} rows. It was cut into "
                    f"{layout.size} rows, as nn.DataParallel does. If each tensor is a sample, stack them. If not, "
                    "pass them as separate arguments.",
                    AmbiguousBatchWarning,
                )

    def _rows_text(self, root: Node) -> str:
        named: dict[int, str] = {}
        for node in root.tensors:
            if (rows := node.extent(self.dim)) is not None:
                named.setdefault(rows, f"{node.place} has {rows} rows")
        return listed([*named.values()], 3)
