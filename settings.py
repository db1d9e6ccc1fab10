"""Settings: a flat dataclass, filled from a config file of plain assignments and from the command line.

One way for every script here: `load_config(Config, sys.argv[1:])`.
"""

import ast
import dataclasses
import difflib
import math
import os
import runpy
import types

import envs


class UserError(ValueError):
    """A mistake that the user can mend: printed without a traceback, exit status 2."""


def load_config(cls, argv):
    """Make a cls (Config or another flat dataclass) of `--config FILE` and `--name=value` or `--name value`.

    A config file is Python: plain assignments to fields, besides imports, classes, functions and _private
    names. Returns (config, names set on the command line, names set in the file). Raises UserError for any
    unknown name (with the nearest known one) and any wrong type.
    """
    fields = {f.name: f.type for f in dataclasses.fields(cls)}
    words, typed, path = list(argv), {}, None
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            raise UserError(f"expected --name=value, got {word!r}")
        name, has_value, value = word[2:].partition("=")
        if name != "config":
            known(name, fields)
        if not has_value:
            if words and not words[0].startswith("--"):
                value = words.pop(0)
            elif fields.get(name) is bool:
                value = "True"
            else:
                raise UserError(f"--{name} needs a value")
        if name == "config":
            path = value
        else:
            typed[name] = parse_value(name, value, fields[name])
    filed = {name: checked(name, value, fields[known(name, fields, path)], path)
             for name, value in ({} if path is None else read_file(path)).items()}
    return cls(**{**filed, **typed}), set(typed), set(filed)


def known(name, fields, path="the command line"):
    if name not in fields:
        near = difflib.get_close_matches(name, fields, 1, 0.5)
        hint = f"; did you mean {near[0]}?" if near else f". The settings are: {', '.join(fields)}"
        raise UserError(f"unknown setting {name!r} in {path}{hint}")
    return name


def read_file(path):
    if not os.path.isfile(path):
        near = sorted(f"configs/{f}" for f in os.listdir("configs")) if os.path.isdir("configs") else []
        raise UserError(f"config file {path!r} does not exist. There are: {', '.join(near)}")
    try:
        names = runpy.run_path(path)
    except (Exception, SystemExit) as error:
        raise UserError(f"config file {path!r} raises {type(error).__name__}: {error}") from None
    return {k: v for k, v in names.items()
            if not k.startswith("_") and not isinstance(v, types.ModuleType) and not callable(v)
            and v is not envs.ENVS}     # a user's world may live in the config file itself


def parse_value(name, text, kind):
    """Read a value from the command line: text as it stands for str, else a Python literal."""
    if kind is str:
        return text
    if kind is bool and text.lower() in ("true", "false"):
        text = text.capitalize()
    if kind is float and text.lower() == "inf":
        return math.inf
    try:
        value = ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):     # TypeError: {[]: 1}
        value = text
    return checked(name, value, kind, "the command line")


def checked(name, value, kind, path):
    try:
        shown = repr(value)
        if kind is float and type(value) is int:
            value = float(value)
    except (ValueError, OverflowError, RecursionError) as error:
        raise UserError(f"{name} in {path} is too large or too deep to be a setting: {error}") from None
    if type(value) is not kind:
        raise UserError(f"{name} in {path} must be {kind.__name__}, got {shown} ({type(value).__name__})")
    return value
