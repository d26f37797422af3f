"""Choose layers of a model to checkpoint. The backward computes their activations again instead of storing them.

Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from autosplit.errors import WorkloadError

AUTO = "auto"


@dataclass(frozen=True)
class Checkpointing:
    """Checkpoint every layer, or every second layer, of the given classes.

    Attributes:
        kinds: Classes of the layers, or their names. `AUTO` for the layers of transformers' models.
        every: 1 for every layer. 2 for every second layer, beginning with the first.
    """

    kinds: tuple[type | str, ...]
    every: int

    def __str__(self) -> str:
        """Return a short description for notes and keys."""
        which = "every" if self.every == 1 else "every second"
        return f"{which} {'layer' if self.kinds == (AUTO,) else self._kinds_text()} checkpointed"

    def check(self, modules: Sequence[nn.Module]) -> None:
        """Raise WorkloadError if there are several models, or if the model has no such layer."""
        if len(modules) > 1:
            raise WorkloadError(
                f"You passed checkpointing with {len(modules)} models. Expected one model, because a plan "
                "names its layers. Leave checkpointing out, and checkpoint the layers yourself.",
            )
        self.names_in(modules[0])

    def names_in(self, model: nn.Module) -> tuple[str, ...]:
        """Return the names of the layers in a model. Ignore layers inside these layers."""
        found: dict[nn.Module, str] = {}
        for name, layer in _outermost(model, self._is_one):
            found.setdefault(layer, name)  # list a layer of two parents once, because `every` counts layers
        if any(getattr(layer, "gradient_checkpointing", False) is True for layer in found):
            raise WorkloadError(
                "checkpointing is given, but the model already checkpoints its layers. Leave out "
                "gradient_checkpointing_enable(), or checkpointing.",
            )
        if not found:
            kinds = self._kinds_text()
            wanted = "a transformers layer" if kinds == AUTO else f"a {kinds}"
            raise WorkloadError(
                f"checkpointing is {kinds!r}, but the {type(model).__name__} has no such layer. Expected {wanted} in "
                "it. Pass checkpointing=Block, the class (or its name) of the repeated layers.",
            )
        return tuple(found.values())[:: self.every]

    def _kinds_text(self) -> str:
        return " or ".join(kind if isinstance(kind, str) else kind.__name__ for kind in self.kinds)

    def _is_one(self, module: nn.Module) -> bool:
        if self.kinds == (AUTO,):
            return is_transformers_layer(module)
        names = {base.__name__ for base in type(module).__mro__}
        return any(kind in names if isinstance(kind, str) else isinstance(module, kind) for kind in self.kinds)


def is_transformers_layer(module: nn.Module) -> bool:
    """Return whether transformers itself can checkpoint this layer."""
    return any(base.__name__ == "GradientCheckpointingLayer" for base in type(module).__mro__)


def _outermost(
    model: nn.Module, is_wanted: Callable[[nn.Module], bool], prefix: str = ""
) -> Iterator[tuple[str, nn.Module]]:
    for name, child in model.named_children():
        if is_wanted(child):
            yield prefix + name, child
        else:
            yield from _outermost(child, is_wanted, f"{prefix}{name}.")
