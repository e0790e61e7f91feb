"""Reads a transport's options from environment variables."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from typing import Any

from proxyccl.device.errors import ArgumentError


def named_options(
    options: Any,
    what: str,
    arguments: Mapping[str, object],
    prefix: str,
    texts: Collection[str],
    check: Callable[[str, str, object], None],
) -> dict[str, Any]:
    """Returns the given options by name: arguments that are not None, and otherwise environment variables.

    Args:
        options: the dataclass of all options.
        what: the owner of the options, for the error.
        arguments: values by option name; None for an option that was not given.
        prefix: prefix of the variables' names.
        texts: names of the options that stay text even if the variable holds digits.
        check: called with an option's name, the option's variable and the value; raises ArgumentError.

    Raises:
        ArgumentError: a variable is out of range, or an argument is not the name of an option.
    """
    named = {name: value for name, value in arguments.items() if value is not None}
    known = [field.name for field in fields(options)]
    for name in named:
        if name not in known:
            raise ArgumentError(name, f"unknown option of {what}; expected one of {', '.join(known)}")
    for name in known:
        variable = prefix + name.upper()
        text = os.environ.get(variable)
        if text and name not in named:
            value: object = int(text) if name not in texts and text.isascii() and text.isdigit() else text
            check(name, variable, value)
            named[name] = value
    return named
