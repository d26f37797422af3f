"""The integrations load with the installed version of their tool. Without the tool, their tests are skipped."""

from __future__ import annotations

import importlib

import pytest

TOOLS = {"transformers": "Trainer", "accelerate": "Accelerator", "lightning": "Shares"}


@pytest.mark.parametrize(("tool", "name"), TOOLS.items())
def test_an_integration_offers_its_class(tool, name):
    pytest.importorskip(tool, reason=f"needs {tool} (the extra `integrations`)")
    module = importlib.import_module(f"autosplit.integrations.{tool}")
    assert getattr(module, name).__doc__
