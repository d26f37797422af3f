from __future__ import annotations

import json
import sysconfig

import pytest

from autosplit.errors import is_installed


@pytest.mark.parametrize(
    ("path", "installed"),
    [
        (json.__file__, True),
        (pytest.__file__, True),
        (f"{sysconfig.get_path('purelib')}/own/module.py", True),
        # Of an environment below this one: `python -m venv --system-site-packages`, or a .pth file.
        ("/usr/lib/python3/dist-packages/torch/nn/__init__.py", True),
        ("/srv/env/lib/python3.11/site-packages/transformers/utils/hub.py", True),
        ("/home/me/train.py", False),
        ("/home/me/site-packages.py", False),
        (__file__, False),
    ],
)
def test_code_that_is_installed_is_told_from_the_users(path, installed):
    assert is_installed(path) is installed
