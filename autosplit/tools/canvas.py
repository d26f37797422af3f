"""Draw figures of plans with matplotlib, for `Plan.plot` and `Goodput.plot`."""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from autosplit.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SETTINGS: Any = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "legend.frameon": False,
    "text.parse_math": False,  # device names may contain dollar signs
    "text.usetex": False,
}


def check_installed(module: str, what: str, package: str | None = None) -> None:
    """Raise InputError if a module that `what` needs is not installed. `package` is the module's name for pip."""
    try:
        importlib.import_module(module)
    except ImportError:
        name = package or module.partition(".")[0]
        raise InputError(
            f"{what} needs {name}, which is not installed. Install it: pip install {name}.", code="package-missing"
        ) from None


def side_by_side(height: float, *draws: Callable[[Any], None]) -> Figure:
    """Draw several axes side by side in one figure, without pyplot. `height` is in inches."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    class Shown(Figure):
        """A figure that notebooks display."""

        def _repr_png_(self) -> bytes:
            stream = io.BytesIO()
            self.savefig(stream, format="png")
            return stream.getvalue()

    with mpl.rc_context(_SETTINGS):
        figure = Shown(figsize=(4.5 * len(draws), height), layout="constrained")
        for axes, draw in zip(figure.subplots(1, len(draws), squeeze=False).flat, draws, strict=True):
            draw(axes)
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2)
    return figure
