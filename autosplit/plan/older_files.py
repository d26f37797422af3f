"""Convert the JSON of older plans: version 1 had notes without kinds, and version 2 had no layouts."""

from __future__ import annotations

from typing import Any

import msgspec

from autosplit.solve.split import accumulation_steps
from autosplit.solve.step_time import Cost

_OF_DEVICE = ("peak_bytes", "busy_s", "memory")
_OF_BOTH = ("options", "least_batch", "shard_size")


def upgraded(text: str | bytes, version: int) -> bytes:
    """Convert JSON of version 1 or 2 to version 3. The caller validates the result.

    Raises:
        ValidationError: A value that the conversion needs is missing or has another type.
    """
    try:
        plain = msgspec.json.decode(text)
        return msgspec.json.encode(_with_layouts(_with_kinds(plain) if version == 1 else plain))
    except msgspec.DecodeError:
        raise  # a ValueError, which the next clause would catch
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise msgspec.ValidationError(f"its schema_version {version} is incomplete: {reason}") from None


def _with_kinds(value: Any, key: str = "") -> Any:
    """Version 1: a note was a string. Since version 2 it has a kind."""
    if isinstance(value, dict):
        return {name: _with_kinds(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [_with_kinds(item, key) for item in value]
    return {"kind": "note", "text": value} if key == "notes" and isinstance(value, str) else value


def _with_layouts(old: dict[str, Any]) -> dict[str, Any]:
    """Version 2: the plan itself was a layout, and `ddp` another one with ranks."""
    ddp, ranks = old["ddp"], old["ddp"]["ranks"]
    of_ranks = bool(ranks) and old.get("region") is None and old["split"] == [rank["batch_size"] for rank in ranks]
    layouts = [_main(old, "ddp" if of_ranks else "balanced")]
    if of_ranks:
        layouts[0] |= {name: ddp[name] for name in _OF_BOTH if name in ddp}
        layouts[0] |= {
            "measured": ddp.get("measured", False),
            "even_samples_per_s": old.get("even_samples_per_s") or ddp.get("even_samples_per_s"),
        }
    elif ranks:
        layouts.append(_ranks(old))
    names = {*old} - {
        *("split", "gpu0_bsz", "batch_size", "accumulation_steps", "effective_batch_size", "samples_per_s"),
        *("even_samples_per_s", "ceilings", "devices", "ddp", "simulated", "region", "fit", "changes", "explained"),
    }
    return {
        **{name: old[name] for name in names},
        "layouts": layouts,
        "why_no_ddp": ddp.get("reason"),
        "what_ifs": old.get("changes"),
        "schema_version": 3,
    }


def _main(old: dict[str, Any], strategy: str) -> dict[str, Any]:
    region = old.get("region")
    return {
        "strategy": strategy,
        "seats": [
            {
                "device": _device(device),
                "samples": samples,
                "ceiling": {**device["ceiling"], "batch_size": ceiling},
                **{name: device[name] for name in _OF_DEVICE if name in device},
            }
            for device, samples, ceiling in zip(old["devices"], old["split"], old["ceilings"], strict=True)
        ],
        "accumulation_steps": old["accumulation_steps"],
        "effective_batch_size": old["effective_batch_size"],
        "samples_per_s": old["samples_per_s"],
        "even_samples_per_s": old.get("even_samples_per_s"),
        "least_batch": 1 if region is None else region.get("least_share", 1),
        "cost": old.get("fit"),
        "region": region,
    }


def _ranks(old: dict[str, Any]) -> dict[str, Any]:
    ddp, ranks = old["ddp"], old["ddp"]["ranks"]
    fit = ddp.get("fit") or old.get("fit")
    curves = None if fit is None else msgspec.convert(fit, Cost).step_time.curves
    forwards, batch_size = {rank["accumulation_steps"] for rank in ranks}, sum(rank["batch_size"] for rank in ranks)
    if len(forwards) > 1:
        raise ValueError(f"the ranks have {sorted(forwards)} accumulation steps")
    (steps,) = forwards
    sizes = ddp.get("effective_batch_size", 0), old["effective_batch_size"]
    whole = (n for n in sizes if batch_size <= n and accumulation_steps(n, batch_size) == steps)
    return {
        "strategy": "ddp",
        "seats": [
            {
                "device": {**_device(device), "label": rank["device"]},
                "samples": rank["batch_size"],
                "ceiling": rank["ceiling"],
                "peak_bytes": rank["peak_bytes"],
                "busy_s": device["busy_s"] if curves is None else curves[place](rank["batch_size"]),
            }
            for place, (device, rank) in enumerate(zip(old["devices"], ranks, strict=True))
        ],
        "accumulation_steps": steps,
        "effective_batch_size": next(whole, batch_size * steps),
        "samples_per_s": ddp["samples_per_s"],
        "measured": ddp.get("measured", False),
        "even_samples_per_s": ddp.get("even_samples_per_s"),
        "cost": fit,
        **{name: ddp[name] for name in _OF_BOTH if name in ddp},
    }


def _device(old: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in old.items() if name not in ("share", "ceiling", *_OF_DEVICE)}
