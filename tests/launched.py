"""Run a script and save its trained model: python launched.py SCRIPT FOLDER."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import torch
from torch import nn


def main() -> None:
    script, folder = sys.argv[1:]
    found = runpy.run_path(script, run_name="__main__")
    trainer = found.get("trainer")
    trained = getattr(trainer, "lightning_module", None) or getattr(trainer, "model", None) or found["network"]
    assert isinstance(trained, nn.Module)
    weights = torch.cat([parameter.detach().flatten() for parameter in trained.parameters()])
    torch.save(weights, Path(folder) / f"{os.environ.get('RANK', 'alone')}.pt")


if __name__ == "__main__":
    main()
