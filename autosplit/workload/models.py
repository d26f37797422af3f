"""The models and optimizers of a workload: one, or several in a sequence or mapping, settled where they are given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from torch import nn

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Several(Generic[T]):
    """One thing or several, each with its name.

    Attributes:
        given: As a user's own code has them: one, or a sequence or mapping of several.
        items: Each of them, in order.
        names: Nothing for one alone, otherwise its key or position.
    """

    given: Any
    items: tuple[T, ...]
    names: tuple[str, ...]

    @classmethod
    def of(cls, given: Any) -> Self:
        """Settle what was given."""
        if not isinstance(given, (tuple, list, Mapping)):
            return cls(given, (given,), ("",))
        named = given.items() if isinstance(given, Mapping) else enumerate(given)
        names, items = zip(*named, strict=True) if given else ((), ())
        return cls(given, items, tuple(map(str, names)))

    def like(self, items: tuple[Any, ...]) -> Self:
        """Return others in the form in which these were given."""
        if isinstance(self.given, Mapping):
            return type(self)(dict(zip(self.given, items, strict=True)), items, self.names)
        made = type(self.given)(items) if isinstance(self.given, (tuple, list)) else items[0]
        return type(self)(made, items, self.names)

    def map(self, function: Callable[[T], Any]) -> Self:
        """Apply a function to each."""
        return self.like(tuple(map(function, self.items)))


class Models(Several[nn.Module]):
    """One model or several."""

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """Each of them, in order."""
        return self.items

    @property
    def first_parameter(self) -> nn.Parameter | None:
        """The parameter that tells where they are; None where there is none."""
        return next((parameter for module in self.modules for parameter in module.parameters()), None)

    @property
    def device_type(self) -> str:
        """The type of device of the first parameter; the processor's where there is none."""
        return "cpu" if self.first_parameter is None else self.first_parameter.device.type
