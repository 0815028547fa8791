"""What a run is made of: TOML, validated before anything starts, with the defaults of every data set in one place."""

from __future__ import annotations

import difflib
import json
import os
import tomllib
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import tomli_w
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout_lab.data import DATASETS, OF_YOUR_OWN, describe_options, fits_type, read_types
from tensor_dropout_lab.nets.families import find_family
from tensor_dropout_lab.nets.head_table import DEFAULT_THETA, DEFAULTS, HEADS, check_name, refuse_unused
from tensor_dropout_lab.training.optimizers import OPTIMIZERS
from tensor_dropout_lab.training.schedule import SCHEDULES


@dataclass(frozen=True, eq=False)
class OneOf:
    """A name that has an entry in a table."""

    known: Mapping[str, Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """The schema of a text, and the check."""
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def check(self, name: str) -> str:
        """Refuse other names."""
        if name not in self.known:
            raise ValueError(f"input should be one of {', '.join(map(repr, self.known))}")
        return name


class Section(BaseModel):
    """One table of the TOML file; unknown keys and wrong types are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class DataConfig(Section):
    """Which data."""

    name: str = "digits"
    root: str | None = None
    seed: int = Field(0, ge=0, lt=2**50)
    options: dict[str, Any] = Field(default_factory=dict)


class NetConfig(Section):
    """Which network and head; what the head does not take must be left out."""

    name: str = "resnet-mini"
    head: str = "rtrl-cp"
    weights: str | None = None  # a file with the state dict of the published network, for all but the head
    stem: Literal["small", "large"] | None = None
    rank: int | float | list[int] | Literal["full"] | None = None
    theta: float | None = None
    law: str | None = None
    modes: Literal["all", "outer", "auto"] | list[int] | None = None
    per_sample: bool | None = None
    scaling: Literal["inverted", "paper"] | None = None
    min_rank: int | None = None
    drop_rate: float | None = None
    init: Literal["pool", "smooth", "normal"] | None = None
    options: dict[str, Any] = Field(default_factory=dict)  # of the function that makes a network of others

    def settings(self) -> dict[str, Any]:
        """The arguments of ``build_net`` that were set, and the file of weights."""
        return {key: value for key, value in self.model_dump().items() if value is not None}


class OptimizerConfig(Section):
    """The optimizer; the factors of tensor layers may have their own rate and decay."""

    name: Annotated[str, OneOf(OPTIMIZERS)] = "adamw"
    lr: float = Field(3e-3, gt=0)
    weight_decay: float = Field(1e-3, ge=0)
    factor_lr: float | None = Field(None, gt=0)
    factor_decay: float | None = Field(None, ge=0)
    momentum: float = Field(0.9, ge=0, lt=1)
    nesterov: bool = False
    clip: float | None = Field(None, gt=0)


class ScheduleConfig(Section):
    """The learning rate over the run, and θ over it."""

    name: Annotated[str, OneOf(SCHEDULES)] = "one-cycle"
    milestones: list[Annotated[int, Field(ge=1)]] = Field(default_factory=list)
    factor: float = Field(0.1, gt=0, lt=1)
    warmup: float = Field(0.3, ge=0, lt=1)
    theta_start: float | None = Field(None, gt=0, le=1)  # θ moves from here to net.theta
    theta_share: float = Field(0.5, gt=0, le=1)  # over this share of the epochs


class RunConfig(Section):
    """How long, how large, how exact, and where."""

    epochs: int = Field(30, ge=1)
    batch: int = Field(64, ge=1)
    seed: int = Field(0, ge=0, lt=2**50)
    loss: Literal["sampled", "expected"] = "sampled"  # expected: over all masks, in closed form
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    adversarial: float | None = Field(None, gt=0, le=1)  # train on attacked inputs, within this share of their range
    ema: float | None = Field(None, gt=0, lt=1)
    device: str = "auto"
    precision: Literal["auto", "float32", "bf16", "float64"] = "auto"
    speed: Literal["auto", "eager", "graph", "compile"] = "auto"
    channels_last: bool = True
    workers: int = Field(2, ge=0)
    threads: int | None = Field(None, ge=1)
    evaluate_every: int = Field(1, ge=1)
    checkpoint_every: int | None = Field(None, ge=1)  # steps
    checkpoint_seconds: float = Field(60.0, ge=0)  # 0: not by the clock
    checkpoint_epochs: int = Field(1, ge=1)  # more, where an epoch is hardly longer than saving
    sharding: Literal["ddp", "fsdp"] = "ddp"
    tensorboard: bool = False


class Config(Section):
    """A whole run."""

    data: DataConfig = DataConfig()
    net: NetConfig = NetConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    run: RunConfig = RunConfig()

    @model_validator(mode="after")
    def _check(self) -> Config:
        if self.schedule.milestones and "milestones" not in SCHEDULES[self.schedule.name].uses:
            owners = " or ".join(repr(name) for name, schedule in SCHEDULES.items() if "milestones" in schedule.uses)
            raise ValueError(f"schedule.milestones are of schedule.name={owners}, not of {self.schedule.name!r}")
        if any(milestone >= self.run.epochs for milestone in self.schedule.milestones):
            raise ValueError(f"schedule.milestones are epochs below run.epochs={self.run.epochs}")
        if any(later <= earlier for earlier, later in pairwise(self.schedule.milestones)):
            raise ValueError(f"schedule.milestones are epochs that increase, got {self.schedule.milestones}")
        takes_nesterov = "nesterov" in OPTIMIZERS[self.optimizer.name].uses
        if self.optimizer.nesterov and (not takes_nesterov or self.optimizer.momentum == 0):
            raise ValueError("optimizer.nesterov is for sgd with optimizer.momentum above 0")
        if self.run.sharding == "fsdp" and self.run.ema is not None:
            raise ValueError('run.ema needs run.sharding="ddp": a sharded network has no average here')
        if self.run.sharding == "fsdp" and self.run.adversarial is not None:
            raise ValueError('run.adversarial needs run.sharding="ddp"')
        if not self.net.head.startswith("rtrl-"):
            for key, asked in {
                'run.loss="expected"': self.run.loss == "expected",
                "schedule.theta_start": self.schedule.theta_start is not None,
            }.items():
                if asked:
                    raise ValueError(f"{key} needs a head with tensor dropout (rtrl-…), got net.head={self.net.head!r}")
        return self


def resolve_config(path: str | os.PathLike[str] | None = None, overrides: Mapping[str, Any] | None = None) -> Config:
    """The whole config: the data set's defaults, then the file, then the overrides.

    Args:
        path: a TOML file, or None.
        overrides: dotted keys with values, such as ``{"net.head": "fc"}``.

    Raises:
        TensorDropoutError: with the key, what was expected and the nearest valid name.

    Example:
        >>> resolve_config(overrides={"data.name": "digits", "run.epochs": 3}).run.epochs
        3
    """
    said: dict[str, Any] = {} if path is None else _read_toml(path)
    for key, value in (overrides or {}).items():
        _put(said, key, value)
    name = said.get("data", {}).get("name", "digits") if isinstance(said.get("data", {}), dict) else None
    if not isinstance(name, str) or name not in DATASETS:
        raise TensorDropoutError(f"config: data.name is {name!r}; {_suggest(str(name), list(DATASETS))}; {OF_YOUR_OWN}")
    merged = _merge(DATASETS[name].defaults, said)
    _check_keys(merged)
    try:
        config = Config.model_validate(merged)
    except ValidationError as error:
        raise TensorDropoutError(_explain(error)) from None
    _check_options(config.data)
    settings = config.net.settings()
    find_family(config.net.name)
    check_name("head", config.net.head, HEADS)
    refuse_unused(config.net.head, {key: value for key, value in settings.items() if key in DEFAULTS})
    return config


def _check_options(data: DataConfig) -> None:
    """Refuse options that the data set does not have, and values of another type."""
    known = describe_options(data.name)
    kinds = read_types(data.name)
    for option, value in data.options.items():
        if option == "target" and option not in known:
            raise TensorDropoutError(
                f"config: {data.name} has no target to choose, got {value!r}; leave out --target (data.options.target)"
            )
        if option not in known:
            raise TensorDropoutError(f"config: data.options.{option} is unknown; {_suggest(option, list(known))}")
        if not fits_type(value, kinds[option]):
            raise TensorDropoutError(f"config: data.options.{option} is of type {known[option].type}, got {value!r}")


def _read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise TensorDropoutError(f"config: {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TensorDropoutError(f"config: {path} is not TOML: {error}") from error


def _put(said: dict[str, Any], key: str, value: Any) -> None:
    *tables, last = key.split(".")
    for table in tables:
        said = said.setdefault(table, {})
        if not isinstance(said, dict):
            raise TensorDropoutError(f"config: {key} goes into {table}, which is not a table")
    said[last] = value


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``over`` on ``base``, table by table."""
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def _check_keys(said: Mapping[str, Any]) -> None:
    """Refuse unknown tables and keys with the nearest valid name."""
    tables: dict[str, Any] = {name: field.annotation for name, field in Config.model_fields.items()}
    for table, content in said.items():
        if table not in tables:
            raise TensorDropoutError(f"config: there is no table [{table}]; {_suggest(table, list(tables))}")
        if not isinstance(content, Mapping):
            raise TensorDropoutError(f"config: [{table}] is a table, got {content!r}")
        for key in content:
            known = list(tables[table].model_fields)
            if key not in known:
                raise TensorDropoutError(f"config: there is no key {table}.{key}; {_suggest(f'{key}', known)}")


def _suggest(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return (f"did you mean {near[0]!r}? " if near else "") + f"known are {', '.join(known)}"


def _explain(error: ValidationError) -> str:
    """The first fault as one sentence: key, value, expectation."""
    kinds = ("literal", "list", "int", "float")
    keys = [".".join(str(p) for p in fault["loc"] if not str(p).startswith(kinds)) for fault in error.errors()]
    fault, key = error.errors()[0], keys[0]
    alternatives = [each["msg"] for each, own in zip(error.errors(), keys, strict=True) if own == key]
    expected = ", or ".join([alternatives[0], *(each.removeprefix("Input should be ") for each in alternatives[1:])])
    expected = expected.removeprefix("Value error, ")
    got = "" if isinstance(fault["input"], dict | BaseModel) else f", got {fault['input']!r}"
    where = f" {key}:" if key else ""
    return f"config:{where} {expected[0].lower()}{expected[1:]}{got}"


def parse_value(key: str, text: str) -> Any:
    """A command-line value as the type that its key has: numbers, true/false, names, lists (``5,3`` or ``[5, 3]``).

    Raises:
        TensorDropoutError: if there is no such key.

    Example:
        >>> parse_value("net.rank", "128,3,3,96"), parse_value("run.epochs", "3"), parse_value("net.head", "fc")
        ([128, 3, 3, 96], 3, 'fc')
    """
    table, _, name = key.partition(".")
    if key == "data.options.target":  # names of columns, whatever they look like
        names = _read_list(text) or [name.strip() for name in text.split(",")]
        return names if len(names) > 1 else names[0]
    if key.startswith(("data.options.", "net.options.")):
        return _guess(text)
    _check_keys({table: {name: None}})
    section: Any = Config.model_fields[table].annotation
    kinds = _flatten(section.model_fields[name].annotation)
    if str in kinds and list not in kinds and int not in kinds:
        return None if text == "none" and type(None) in kinds else text
    value = _guess(text)
    if float in kinds and type(value) is int and int not in kinds:
        return float(value)
    return [value] if list in kinds and int not in kinds and type(value) is int else value


def _guess(text: str) -> Any:
    listed = _read_list(text)
    if listed is not None:
        return listed
    lowered = text.strip().lower()
    if lowered in ("true", "false", "none"):
        return {"true": True, "false": False, "none": None}[lowered]
    parts = [_guess(part) for part in text.split(",") if part.strip()] if "," in text else []
    if parts and all(isinstance(part, int | float) for part in parts):  # a sentence may have commas, too
        return parts
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _read_list(text: str) -> list[Any] | None:
    """A list in TOML's form, such as ``[5, 3]``; None if it is none."""
    if not text.strip().startswith("["):
        return None
    try:
        return list(tomllib.loads(f"list = {text}")["list"])
    except tomllib.TOMLDecodeError:
        return None


def _flatten(annotation: Any) -> set[Any]:
    """The plain types inside a union, a literal or a list."""
    if get_origin(annotation) in (Union, types.UnionType):
        return set().union(*(_flatten(part) for part in get_args(annotation)))
    if get_origin(annotation) is Literal:
        return {str}
    return {get_origin(annotation) or annotation}


def write_toml(config: Config) -> str:
    """The resolved config as TOML; what is not set is left out."""
    tables = config.model_dump(exclude_none=True)
    for section in tables.values():
        options = section.pop("options", {})
        if given := {key: value for key, value in options.items() if value is not None}:
            section["options"] = given
    return "# The resolved config of this run: defaults, file and command line together.\n\n" + tomli_w.dumps(tables)


_UNSET = {
    "net.stem": "large if a size of the input is above 64, else small",
    "net.rank": "half the channels; of fc+low-rank at most half the outputs",
    "net.theta": DEFAULT_THETA,
    "net.modes": "outer, the channels and the outputs, of Tucker; else all",
    "optimizer.factor_lr": "lr / K for a weight that is a product of K operands",
    "optimizer.factor_decay": "weight_decay",
    "run.threads": "torch's own",
}
"""What a key that is not set comes to, where that is not nothing."""


def describe_keys(config: Config) -> str:
    """Every key with its value here, and what it may be; keys that are not set are commented out."""
    lines = ["# Every key, with the value that this command would use; set any with --set TABLE.KEY=VALUE."]
    for table, section in config:
        lines += ["", f"[{table}]  # {(type(section).__doc__ or '').strip()}"]
        for key, field in type(section).model_fields.items():
            value = getattr(section, key)
            if key == "options":
                continue
            line = f"{key} = {_show_value(value)}" if value is not None else _describe_unset(config, table, key)
            names = [repr(name) for choice in field.metadata if isinstance(choice, OneOf) for name in choice.known]
            lines.append(f"{line:<36} # {' | '.join(names) or _name_type(field.annotation)}")
    if config.data.options:
        lines += [
            "",
            "[data.options]",
            *(f"{key} = {_show_value(value)}" for key, value in config.data.options.items()),
        ]
    return "\n".join(lines)


def _show_value(value: Any) -> str:
    """A value in one line: what JSON writes for it is TOML, too."""
    return json.dumps(value, ensure_ascii=False)


def _describe_unset(config: Config, table: str, key: str) -> str:
    """A key that is not set, as a comment with what it comes to."""
    default = _UNSET.get(f"{table}.{key}")
    if table == "net" and key in DEFAULTS:
        try:
            refuse_unused(config.net.head, {key: "anything"})
        except TensorDropoutError:
            return f"# {key}: not of the head {config.net.head}"
        default = DEFAULTS[key] if default is None else default
    shown = default if isinstance(default, str) else _show_value(default)
    return f"# {key} = (not set)" if default is None else f"# {key} = (not set: {shown})"


def _name_type(annotation: Any) -> str:
    """A type as one would write it, without its limits.

    Example:
        >>> _name_type(list[Annotated[int, Field(ge=1)]]), _name_type(Literal["all"] | None)
        ('list[int]', "'all' | none")
    """
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is None:
        return "none" if annotation is type(None) else annotation.__name__
    if origin is Annotated:
        return _name_type(parts[0])
    inner = [repr(part) if isinstance(part, str) else _name_type(part) for part in parts]
    return (
        " | ".join(inner) if origin in (Union, types.UnionType, Literal) else f"{origin.__name__}[{', '.join(inner)}]"
    )
