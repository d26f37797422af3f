"""Add the version and edit links to the documentation site. mkdocs.yml loads this file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any


def on_config(config: Any) -> Any:
    """Add the version in pyproject.toml to the site's name. Set edit links if the repository is known."""
    project = Path(config.config_file_path).with_name("pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r'^version = "(.+)"$', project, re.MULTILINE)
    assert found, "pyproject.toml has no version"
    config.site_name += f" {found[1]}"
    config.edit_uri = "edit/main/docs/" if config.repo_url else ""
    return config
