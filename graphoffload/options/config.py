"""The one configuration. Every option of the user is checked at once, hashable, and the same in every process.

    OffloadConfig(device_budget="40GiB")             in code
    OffloadConfig.from_options({"device_budget": …}) from torch.compile(options=...), over GRAPHOFFLOAD_* of the environment

docs/config.md describes every field with an example and the error for bad input.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from graphoffload.errors import ConfigError, LargeSlowdownWarning, warn
from graphoffload.options.policies import StoredPolicy, normalize_policy, stable_text
from graphoffload.units import parse_size

ENV_PREFIX = "GRAPHOFFLOAD_"
OTHER_VARIABLES = frozenset(ENV_PREFIX + name for name in ("CACHE_DIR", "ACROSS_GRAPHS", "ACROSS_RANKS"))  # read elsewhere
VERIFY_LEVELS = ("graph", "checksum", "off")
INNER_COMPILERS = ("inductor", "aot_eager")


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """The user's options. Frozen, hashable, picklable; every field is checked when the value is made.

    Sizes are ints of bytes, "40GiB", "40GB" (decimal) or "80%"; they are stored as ints, or as the percentage.

    Attributes:
        device_budget: peak device bytes of this process, everything counted; "auto" fits the device.
        reserve: device bytes to leave for what is allocated later outside the graph; "auto" estimates it.
        max_slowdown: save as much memory as possible within this fraction of step time (0.02 is 2 %; the first 0.5 % are free);
            excludes a device_budget.
        policy: "auto", "keep", "offload", "recompute", a mapping {pattern: action} (stored as pairs), or a callable.
        offload_modules: patterns of the activations that may be offloaded; None: all. A str is one pattern.
        min_tensor_bytes: smaller tensors stay.
        offload_fraction: of the eligible bytes, larger tensors and those produced early first; 0.0 to 1.0.
        host_budget: pinned host bytes; a percentage is of the host's memory; "auto" asks the host.
        max_inflight_bytes: D2H copies outstanding in forward before compute waits; None (or "planned"): planned.
        hardware: "measure", a profile's name, or a HardwareProfile.
        verify: "graph", "checksum" or "off".
        dump_dir: folder for graph dumps.
        inner: inner compiler, "inductor" or "aot_eager". mode: Inductor's mode.
        inductor_options: options of torch._inductor.config as pairs; from_options fills it.

    Raises:
        ConfigError: a value of the wrong type or out of range, or max_slowdown beside a device_budget.
    """

    device_budget: int | str = "auto"
    reserve: int | str = "auto"
    max_slowdown: float | None = None
    policy: StoredPolicy | Mapping[str, str] = "auto"
    offload_modules: Sequence[str] | None = None
    min_tensor_bytes: int = 2**20
    offload_fraction: float = 1.0
    host_budget: int | str = "auto"
    max_inflight_bytes: int | None = None
    hardware: Any = "measure"
    verify: str = "graph"
    dump_dir: str | None = None
    inner: str = "inductor"
    mode: str | None = None
    inductor_options: tuple[tuple[str, Any], ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            object.__setattr__(self, name, check(name, getattr(self, name)))
        object.__setattr__(self, "inductor_options", tuple(sorted(dict(self.inductor_options).items())))
        if self.max_slowdown is not None and self.device_budget != "auto":
            raise ConfigError(
                f"max_slowdown={self.max_slowdown} beside device_budget={self.device_budget!r}: the first asks for the least "
                "memory at a given time, the second for the least time at a given memory. Give one of the two; "
                'device_budget="auto" goes with either.'
            )
        if self.max_slowdown is not None and self.max_slowdown > 1.0:
            warn(LargeSlowdownWarning, _large_slowdown(self.max_slowdown))

    @classmethod
    def from_options(
        cls, options: Mapping[str, Any] | None = None, *, environ: Mapping[str, str] | None = None
    ) -> OffloadConfig:
        """Configuration from torch.compile's `options`, over the GRAPHOFFLOAD_* variables of `environ` (default: os.environ).

        An option overrides its variable. device_budget and max_slowdown are one choice: an explicit one of them in `options`
        also overrides the other's variable. Keys of torch._inductor.config go to `inductor_options`.

        Raises:
            ConfigError: an unknown key or variable, or a bad value; the message names the variable that the value came from.
        """
        own, inductor = split_options(options)
        from_env = read_environment(os.environ if environ is None else environ)
        if own.get("max_slowdown") is not None:
            from_env.pop("device_budget", None)
        if own.get("device_budget", "auto") != "auto":
            from_env.pop("max_slowdown", None)
        return cls(**{**from_env, **own}, inductor_options=tuple(inductor.items()))

    def with_options(self, **changes: Any) -> OffloadConfig:
        """A copy with some fields changed.

        Raises:
            ConfigError: an unknown field or a bad value.
        """
        unknown = [name for name in changes if name not in FIELD_NAMES and name != "inductor_options"]
        if unknown:
            raise ConfigError(_unknown_key(unknown[0], "option"))
        sizes = {name: f"{value}B" for name in _BUDGETS if isinstance(value := getattr(self, name), int)}  # given with a unit
        return dataclasses.replace(self, **{**sizes, **changes})

    @property
    def has_budget(self) -> bool:
        """Whether the user gave a device_budget. A configuration with one has no max_slowdown."""
        return self.device_budget != "auto"

    @property
    def limits_time(self) -> bool:
        """Whether the user gave a max_slowdown, so that plans make memory small and not time."""
        return self.max_slowdown is not None

    def digest(self) -> str:
        """Hex digest over all fields, equal in every process: for cache keys. A policy function counts by name and source."""
        values = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        return hashlib.sha256(stable_text(values).encode()).hexdigest()[:32]


def split_options(options: Mapping[str, Any] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """(our own options, those of torch._inductor.config) by field name; dashes stand for underscores as in torch.compile.

    Raises:
        ConfigError: a key that neither knows, a key given twice, or an Inductor option of the wrong type.
    """
    if options is not None and not isinstance(options, Mapping):
        raise ConfigError(f"options={options!r} is a {type(options).__name__}; options is a dict {{option: value}}.")
    own: dict[str, Any] = {}
    inductor: dict[str, Any] = {}
    for key, value in (options or {}).items():
        if not isinstance(key, str):
            raise ConfigError(f'options has the key {key!r}, a {type(key).__name__}; a key is a str such as "device_budget".')
        name = key.replace("-", "_")
        if name in own or name in inductor:
            raise ConfigError(f"options has {name!r} twice, with a dash and with an underscore; give it once.")
        if name in FIELD_NAMES:
            own[name] = value
        else:
            inductor[name] = _inductor_value(key, name, value)
    return own, inductor


def _inductor_value(key: str, name: str, value: Any) -> Any:
    from graphoffload.torch_internals.inductor import (
        config as inductor_config,  # imported late, since it is slow and needed only here
    )

    known = inductor_config.get_config_copy()
    if name not in known:
        raise ConfigError(_unknown_key(key, "option", also=known))
    wanted = inductor_config.get_type(name)  # type: ignore[attr-defined]
    if isinstance(wanted, type) and not isinstance(value, wanted):
        raise ConfigError(
            f"{key}={value!r} is a {type(value).__name__}; torch._inductor.config.{name} is a {wanted.__name__} "
            f"(now {known[name]!r}). Give a {wanted.__name__}, or leave it out."
        )
    return value


def _unknown_key(key: str, what: str, also: Iterable[str] = ()) -> str:
    close = difflib.get_close_matches(key.replace("-", "_").lower(), [*FIELD_NAMES, *also], n=1)
    hint = f"Did you mean {close[0]!r}? " if close else ""
    return (
        f"{key!r} is no {what} of graphoffload. {hint}Known: {', '.join(FIELD_NAMES)}; and every key of torch._inductor.config."
    )


def read_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """Fields set by GRAPHOFFLOAD_* variables, checked. An empty variable counts as unset; "none" is None.

    Raises:
        ConfigError: an unknown variable or a bad value; the variable is named.
    """
    found: dict[str, Any] = {}
    for variable in sorted(environ):
        text = environ[variable].strip()
        if not variable.startswith(ENV_PREFIX) or variable in OTHER_VARIABLES or not text:
            continue
        name = variable[len(ENV_PREFIX) :].lower()
        if name not in FIELD_NAMES or variable != variable.upper():
            close = difflib.get_close_matches(name, FIELD_NAMES, n=1)
            hint = f" Did you mean {ENV_PREFIX}{close[0].upper()}?" if close else ""
            known = ", ".join(ENV_PREFIX + known.upper() for known in FIELD_NAMES)
            raise ConfigError(
                f"{variable}={text!r} in the environment sets no known field.{hint} Known: {known}. Unset it, or rename it."
            )
        try:
            found[name] = _CHECKS[name](name, parse_text(name, text))
        except ConfigError as error:
            raise ConfigError(f"{error} (The value came from the environment variable {variable}.)") from None
    return found


def parse_text(name: str, text: str) -> Any:
    """A field's value as written in a variable or on a command line: lists by commas, mappings as JSON, "none" for None.

    Raises:
        ConfigError: JSON or a number that does not parse. The value is checked when the configuration is made.
    """
    if text.lower() == "none" and name in ("max_slowdown", "offload_modules", "max_inflight_bytes", "dump_dir", "mode"):
        return None
    if name == "verify":
        return {"0": "off", "false": "off", "no": "off", "1": "graph", "true": "graph", "on": "graph", "yes": "graph"}.get(
            text.lower(), text
        )
    if name == "offload_modules":
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if name == "policy" and text.startswith("{"):
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            known = """write {"*.mlp": "recompute"} or a policy's name"""
            raise ConfigError(f"policy={text!r} is no JSON ({error}); {known}.") from None
    if name in ("max_slowdown", "offload_fraction"):
        return _number(name, text)
    if name in ("device_budget", "reserve", "min_tensor_bytes", "host_budget", "max_inflight_bytes"):
        return text.lower() if text.isalpha() else text
    return text


def _number(name: str, text: str) -> float:
    try:
        return float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        raise ConfigError(f'{name}={text!r} (str) is no number; give a fraction such as 0.02, or "2%".') from None


def _size(name: str, value: Any, *, word: str | None = "auto", share: bool = True, least: int = 0) -> int | str:
    """Ints for sizes; "auto" and percentages (as "80%") stay text, since only the device or host knows their bytes."""
    if word is not None and value == word:
        return word
    try:
        nbytes = parse_size(value, field=name, whole_bytes=10**18 if share else None)
    except ConfigError as error:
        raise ConfigError(f'{error} Or "{word}".' if word else str(error)) from None
    if name in _BUDGETS and 0 < nbytes < _least_meant(value):
        raise ConfigError(_no_unit(name, value, nbytes))
    if nbytes < least:
        raise ConfigError(
            f'{name}={value!r} is less than {least} byte; give a size such as "40GiB"' + (f', or "{word}".' if word else ".")
        )
    return f"{float(value.strip()[:-1]):g}%" if isinstance(value, str) and value.strip().endswith("%") else nbytes


_BUDGETS = ("device_budget", "host_budget", "reserve")


def _least_meant(value: Any) -> int:
    """Bytes below which a size without a unit is probably a mistake. A size typed as text may also lack its "MiB"."""
    if isinstance(value, str):
        return 2**20 if re.fullmatch(r"[\s\d.]+", value) else 0
    return 2**12


def _no_unit(name: str, value: Any, nbytes: int) -> str:
    number = str(value).strip()
    meant = f"{number}{'GiB' if nbytes < 2**10 else 'MiB'}"
    return f'{name}={value!r} has no unit, which makes it {nbytes} bytes. Did you mean "{meant}"? If not, write "{number}B".'


def _device_budget(name: str, value: Any) -> int | str:
    return _size(name, value, least=1)


def _min_tensor_bytes(name: str, value: Any) -> int | str:
    return _size(name, value, word=None, share=False)


def _max_inflight_bytes(name: str, value: Any) -> int | str | None:
    if value is None or value == "planned":
        return None
    return _size(name, value, word="planned", share=False, least=1)


def _fraction(name: str, value: Any, most: float) -> float:
    if isinstance(value, str):
        value = _number(name, value.strip())
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ConfigError(f"{name}={value!r} is a {type(value).__name__}; give a fraction such as 0.02 for 2 %.")
    fraction = float(value)
    if not 0.0 <= fraction <= most or math.isinf(fraction):
        bounds = f"between 0 and {most:g}" if math.isfinite(most) else "of at least 0, and finite"
        raise ConfigError(f"{name}={value!r} is out of range; give a fraction {bounds}, such as 0.02 for 2 %.")
    return fraction


def _max_slowdown(name: str, value: Any) -> float | None:
    return None if value is None else _fraction(name, value, math.inf)


def _large_slowdown(given: float) -> str:
    """A warning about a max_slowdown above 1: its meaning, and the percentage that was probably meant."""
    return (
        f"max_slowdown={given:g} is a fraction: it lets a step take {1.0 + given:g} times as long ({given:+.0%}), for the "
        f'memory that this saves. If {given:g} % was meant, give max_slowdown={given / 100:g}, or "{given:g}%".'
    )


def _offload_fraction(name: str, value: Any) -> float:
    return _fraction(name, value, 1.0)


def _policy(name: str, value: Any) -> StoredPolicy:
    return normalize_policy(value)


def _offload_modules(name: str, value: Any) -> tuple[str, ...] | None:
    if value is None:
        return None
    patterns = (value,) if isinstance(value, str) else value
    if isinstance(patterns, (Mapping, bytes)) or not isinstance(patterns, Iterable):
        raise ConfigError(
            f'{name}={value!r} is a {type(value).__name__}; give a pattern such as "*.self_attn", or several in a list.'
        )
    patterns = tuple(sorted(patterns, key=str)) if isinstance(patterns, (set, frozenset)) else tuple(patterns)
    for pattern in patterns:
        if not isinstance(pattern, str) or not pattern.strip():
            raise ConfigError(f'{name} holds {pattern!r} ({type(pattern).__name__}); a pattern is a str such as "*.self_attn".')
    if not patterns:
        raise ConfigError(f'{name}={value!r} is empty: nothing could be offloaded. Use None for any module, or policy="keep".')
    return tuple(pattern.strip() for pattern in patterns)


def _hardware(name: str, value: Any) -> Any:
    if isinstance(value, str) and value.strip():
        return value.strip()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return value
    raise ConfigError(
        f'{name}={value!r} is a {type(value).__name__}; give "measure", a name such as "h200-sxm", or a HardwareProfile.'
    )


def _choice(name: str, value: Any, known: Iterable[str]) -> str:
    known = tuple(known)
    if isinstance(value, str) and value in known:
        return value
    close = difflib.get_close_matches(str(value), known, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ConfigError(f"{name}={value!r} ({type(value).__name__}) is unknown; known: {', '.join(known)}.{hint}")


def _verify(name: str, value: Any) -> str:
    return _choice(name, value, VERIFY_LEVELS)


def _inner(name: str, value: Any) -> str:
    return _choice(name, value, INNER_COMPILERS)


def _mode(name: str, value: Any) -> str | None:
    if value is None:
        return None
    from graphoffload.torch_internals.inductor import options_of_mode  # imported late: slow, needed only here

    return _choice(name, value, options_of_mode())


def _dump_dir(name: str, value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise ConfigError(f'{name}={value!r} is a {type(value).__name__}; give a folder such as "dumps", or None for no dumps.')
    return str(os.fspath(value))


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "device_budget": _device_budget,
    "reserve": _size,
    "max_slowdown": _max_slowdown,
    "policy": _policy,
    "offload_modules": _offload_modules,
    "min_tensor_bytes": _min_tensor_bytes,
    "offload_fraction": _offload_fraction,
    "host_budget": _size,
    "max_inflight_bytes": _max_inflight_bytes,
    "hardware": _hardware,
    "verify": _verify,
    "dump_dir": _dump_dir,
    "inner": _inner,
    "mode": _mode,
}
FIELD_NAMES = tuple(_CHECKS)
