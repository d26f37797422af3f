"""Handle one or several models or optimizers in the same manner."""

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
    """One object or several, each with its name.

    Attributes:
        names: The key or position of each object. An empty string for a single object.
    """

    given: Any
    items: tuple[T, ...]
    names: tuple[str, ...]

    @classmethod
    def of(cls, given: Any) -> Self:
        """Convert the user's argument."""
        if not isinstance(given, (tuple, list, Mapping)):
            return cls(given, (given,), ("",))
        named = given.items() if isinstance(given, Mapping) else enumerate(given)
        names, items = zip(*named, strict=True) if given else ((), ())
        return cls(given, items, tuple(map(str, names)))

    def like(self, items: tuple[Any, ...]) -> Self:
        """Return other objects in the same form as these: single, sequence or mapping."""
        if isinstance(self.given, Mapping):
            return type(self)(dict(zip(self.given, items, strict=True)), items, self.names)
        made = type(self.given)(items) if isinstance(self.given, (tuple, list)) else items[0]
        return type(self)(made, items, self.names)

    def map(self, function: Callable[[T], Any]) -> Self:
        """Apply a function to each object."""
        return self.like(tuple(map(function, self.items)))


class Models(Several[nn.Module]):
    """One model or several."""

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The models, in order."""
        return self.items

    @property
    def first_parameter(self) -> nn.Parameter | None:
        """The first parameter of the models, or None. Its device is the device of the models."""
        return next((parameter for module in self.modules for parameter in module.parameters()), None)

    @property
    def device_type(self) -> str:
        """The device type of the first parameter, or "cpu" if there is none."""
        return "cpu" if self.first_parameter is None else self.first_parameter.device.type
