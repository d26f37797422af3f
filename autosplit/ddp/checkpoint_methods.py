"""The methods of a context that save and load checkpoints."""

from __future__ import annotations

import os
from typing import Any

from autosplit.ddp.checkpoint import load_checkpoint, load_sharded, save_checkpoint, save_sharded


class CheckpointMethods:
    """Save and load checkpoints on all ranks; a base of `Context`."""

    rank: int

    def save_checkpoint(self, path: str | os.PathLike[str], **parts: Any) -> None:
        """Let rank 0 write a checkpoint; on the other ranks it does nothing, unless they share out what it keeps.

            ctx.save_checkpoint("last.pt", model=model, optimizer=optimizer, sampler=loader.batch_sampler, step=number)

        Rank 0 writes a new file, reads it back, checks its CRCs (about 1 s per GiB), and then replaces the old file.
        If the path is a symbolic link, the target of the link is replaced. `torch.load` reads the file, too. The parts
        of a model that `shard` has shared out are gathered in rank 0's host memory, so every rank must call this
        method. If they do not fit there, use `save_sharded`.

        Call it after `optimizer.step()`. A sampler that is saved between the last backward and the update counts only
        the steps before: a resumed run computes that step again.

        Args:
            **parts: Objects with a ``state_dict()`` (a wrapped model is saved under the names of the plain model), or
                numbers, strings, tensors, lists and dicts, which are saved unchanged.

        Raises:
            CheckpointError: The file was not written, and an earlier file is unchanged. Raised on rank 0, and on all
                ranks if the parts include a model that is shared out.
        """
        save_checkpoint(path, parts, rank=self.rank)

    def load_checkpoint(self, path: str | os.PathLike[str], **parts: Any) -> dict[str, Any]:
        """Load a checkpoint on every rank, or on none; call it on every rank.

            rest = ctx.load_checkpoint("last.pt", model=model, optimizer=optimizer, sampler=loader.batch_sampler)

        Each rank maps the file into host memory, checks its CRCs (about 1 s per GiB), and fills its own device from
        there. No code in the file is executed. The ranks verify every part, and that they read the same checkpoint,
        before any part changes. Files that plain modules, nn.DataParallel, DistributedDataParallel or
        `BalancedDataParallel` saved fit as well. A model that is shared out takes its own parts of them.

        Args:
            **parts: Objects to load, under the names that they were saved with. A part without a ``load_state_dict``,
                such as a number, must be in the file and is returned: the caller's variable can't be changed.

        Returns:
            The values in the file that were not loaded into a part.

        Raises:
            CheckpointError: On any rank the file is missing, damaged, does not fit, or is another checkpoint than rank
                0's. Nothing was changed on any rank.
        """
        return load_checkpoint(path, parts, rank=self.rank)

    def save_sharded(self, path: str | os.PathLike[str], **parts: Any) -> None:
        """Let every rank write its own part of a checkpoint into a folder; call it on every rank.

            ctx.save_sharded("last", model=model, optimizer=optimizer, sampler=loader.batch_sampler, step=number)

        Nothing comes together in one place, and any number of ranks can load it, into models that are shared out,
        wrapped or plain. An earlier checkpoint is replaced, all of it at once, when the new one is whole. The folder is
        one of torch.distributed.checkpoint's.

        Args:
            path: The folder, which all ranks see and in which nothing else is; it is made where it is not there.
            **parts: As for `save_checkpoint`.

        Raises:
            CheckpointError: It was not written, on any rank; an earlier one is as it was.
        """
        save_sharded(path, parts, rank=self.rank)

    def load_sharded(self, path: str | os.PathLike[str], **parts: Any) -> dict[str, Any]:
        """Load what `save_sharded` wrote on every rank, or on none; call it on every rank.

            rest = ctx.load_sharded("last", model=model, optimizer=optimizer, sampler=loader.batch_sampler)

        Each rank reads its own part into host memory. Load only what you wrote: torch.distributed.checkpoint keeps the
        list of the tensors as a pickle, and whatever is in it runs.

        Args:
            **parts: Models, optimizers, samplers and the like, under the names that they were saved with.

        Returns:
            What else it holds, apart from the states of models and the like.

        Raises:
            CheckpointError: It is missing, cut short or does not fit, on any rank; nothing was changed.
        """
        return load_sharded(path, parts, rank=self.rank)
