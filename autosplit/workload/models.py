"""The models of a workload: one, or several in a sequence or mapping, settled where they are given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True, eq=False)
class Models:
    """One model or several, each with its name.

    Attributes:
        given: As a user's own code has them: one module, or a sequence or mapping of several.
        modules: Each of them, in order.
        names: Nothing for one alone, otherwise its key or position.
    """

    given: Any
    modules: tuple[nn.Module, ...]
    names: tuple[str, ...]

    @classmethod
    def of(cls, given: Any) -> Models:
        """Settle what was given."""
        if isinstance(given, nn.Module):
            return cls(given, (given,), ("",))
        named = given.items() if isinstance(given, Mapping) else enumerate(given)
        names, modules = zip(*named, strict=True) if given else ((), ())
        return cls(given, modules, tuple(map(str, names)))

    def map(self, function: Callable[[nn.Module], Any]) -> Models:
        """Apply a function to each, and return what it makes of them in the form in which they were given."""
        made = tuple(map(function, self.modules))
        if isinstance(self.given, nn.Module):
            return Models(made[0], made, self.names)
        if isinstance(self.given, Mapping):
            return Models(dict(zip(self.given, made, strict=True)), made, self.names)
        return Models(type(self.given)(made), made, self.names)

    @property
    def first_parameter(self) -> nn.Parameter | None:
        """The parameter that tells where they are; None where there is none."""
        return next((parameter for module in self.modules for parameter in module.parameters()), None)

    @property
    def device_type(self) -> str:
        """The type of device of the first parameter; the processor's where there is none."""
        return "cpu" if self.first_parameter is None else self.first_parameter.device.type
