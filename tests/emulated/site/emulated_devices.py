"""Emulated devices. torch imports this module in every process that has this folder on its path."""

import importlib.util
import sys
from pathlib import Path


def load() -> None:
    """Load the devices if this process wants them and they can be built."""
    if "emulated" not in sys.modules:
        start = Path(__file__).parents[1] / "__init__.py"
        found = importlib.util.spec_from_file_location(
            "emulated", start, submodule_search_locations=[str(start.parent)]
        )
        sys.modules["emulated"] = importlib.util.module_from_spec(found)
        found.loader.exec_module(sys.modules["emulated"])
    import emulated

    if emulated.wanted() and emulated.library is None:
        try:
            emulated.load()
        except emulated.NoCompiler as error:
            print(f"no emulated devices: {error}", file=sys.stderr)  # noqa: T201 - torch would make an error of it
