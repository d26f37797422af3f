"""What of a plan is made to be shared: its numbers, and nothing that tells whose they are.

A report and `show --json` end in chats and issues. UUIDs of cards, process ids, paths (which hold home folders and the
names of users) and URLs that may hold credentials are left out there; the saved plan keeps them.
"""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

from autosplit.plan.record import PlanRecord
from autosplit.text import shortened

__all__ = ["shareable", "without_private"]

AnyPlan = TypeVar("AnyPlan", bound=PlanRecord)

# A blank belongs to a path only where another slash follows: what comes after a path's end is prose. Lengths are
# bounded, so that no text takes long.
_LETTER = r"[^\s'\"`<>|:;,()\[\]{}/\\]"
_PART = rf"{_LETTER}{{1,255}}"
_INNER = rf"{_PART}(?:[ ]{_PART}){{0,8}}[/\\]+"
_PATH = rf"(?:{_INNER}){{0,64}}(?:{_PART})?"

# Of relative paths what is surely one: samples/s, and/or and 1/2.5 have slashes as well.
_FILE = "bad|bin|ckpt|csv|db|html|ipynb|json|lock|log|npy|npz|pdf|pkl|pth?|py|safetensors|so|sqlite3?|toml|txt|ya?ml"
_RELATIVE = rf"(?:[\w.-]{{1,255}}[/\\]{{1,4}}){{1,64}}[\w.-]{{0,255}}\.(?:{_FILE})(?!\w)"

_PRIVATE = re.compile(
    rf"""
    (?P<url>\b[a-z][a-z0-9+.-]{{1,30}}:/{{2,4}}(?:\S|[ ](?=[^\s'"<>:;,()]{{1,255}}/)){{1,2000}})
    |(?P<uuid>\b(?:MIG-)?(?:GPU|MIG)-[0-9a-f][0-9a-f-]{{3,}}(?:/\d+/\d+)?(?!\w)
        |\b[0-9a-f]{{8}}-(?:[0-9a-f]{{4}}-){{3}}[0-9a-f]{{12}}\b
        |(?<![0-9a-z])[0-9a-f]{{32}}(?![0-9a-z]|\.\w))
    |(?P<pid>\b(?:pid|process\ id|process)[\s=:\#]{{1,3}}\d{{2,20}}\b(?:\ on\ \S{{1,255}})?)
    |(?P<path>
        (?:(?<![\w/~])|(?=/{{1,4}}(?:home|users)/))(?:/+|~[\w.-]{{0,64}}[/\\]+)(?={_LETTER}){_PATH}
        |(?<!\w)[a-z]:[\\/]+{_PATH}
        |(?<![\w\\])\\\\{_PATH}
        |(?<!\w)(?:\.{{1,2}}[/\\])+{_PATH}
        |(?<![\w./\\~-]){_RELATIVE})
    """,
    re.IGNORECASE | re.VERBOSE,
)


LONGEST = 20_000
"""Characters of one text that are kept; of a longer one the middle is left out."""

_DIGEST = re.compile(r"[0-9a-f]{32}")
"""A text that is one and nothing else: parts of a workload are told apart by these. A UUID stands among words."""

_MOST_PASSES = 4
"""What was left out may show that what stands next to it is a path."""


def shareable(plan: AnyPlan) -> AnyPlan:
    """Return the same plan without what tells where and by whom it was made.

    Args:
        plan: It stays as it is.

    Returns:
        A plan with the same numbers. Devices have no `uuid`; in every text UUIDs, process ids, paths and URLs are
        replaced by ``[uuid]``, ``[process]``, ``[path]`` and ``[url]``. Addresses of web pages stay.
    """
    devices = tuple(replace(device, uuid=None) for device in plan.devices)
    known = tuple({device.uuid for device in plan.devices if device.uuid})
    shared: AnyPlan = _shared(replace(plan, devices=devices), known)
    return shared


def without_private(text: str, known: tuple[str, ...] = ()) -> str:
    """Return a text without UUIDs, process ids, paths and URLs.

    Args:
        text: Any.
        known: UUIDs that are left out, of whatever form.
    """
    if _DIGEST.fullmatch(text) and text not in known:
        return text
    text = shortened(text, LONGEST)  # no honest text of a plan is as long, and searching it takes time
    for one in known:
        text = text.replace(one, "[uuid]")
    for _ in range(_MOST_PASSES):
        left, text = text, _PRIVATE.sub(_stand_in, text)
        if left == text:
            break
    return text


def _stand_in(match: re.Match[str]) -> str:
    kind = match.lastgroup
    if kind == "url":
        url = match[0]
        is_page = url.lower().startswith(("https://", "http://")) and not set(url) & set("@?#")
        end = url[-1] if url[-1] in "'\"" else ""  # of a text that quotes it
        return url if is_page else f"[url]{end}"
    return {"uuid": "[uuid]", "pid": "[process]", "path": "[path]"}[str(kind)]


def _shared(value: Any, known: tuple[str, ...]) -> Any:
    if isinstance(value, str):
        return without_private(value, known)
    if isinstance(value, (tuple, list)):
        return type(value)(_shared(item, known) for item in value)
    if isinstance(value, dict):
        return {_shared(key, known): _shared(item, known) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{part.name: _shared(getattr(value, part.name), known) for part in fields(value)})
    return value
