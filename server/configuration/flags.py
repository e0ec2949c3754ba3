"""Options of a command, made from the fields of `Configuration`."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import annotated_types
import typer
from pydantic import AfterValidator, SecretStr
from pydantic.fields import FieldInfo
from typer.exceptions import TyperException

from chairlift.server.configuration.fields import Configuration, about, names
from chairlift.server.configuration.read import FILE_VARIABLE, ConfigurationError, read
from chairlift.server.configuration.serving import check_names, model_options
from chairlift.server.configuration.types import PathRule

GROUP = "Configuration"
USAGE = 2


class Misconfigured(TyperException):
    exit_code = USAGE


def configured(run: Callable[..., int], *more: inspect.Parameter) -> Callable[..., int]:
    """A function for typer that has every setting as an option, and gives `run` what is in effect.

    Args:
        run: takes the outcome, and by name what is given for `more`.
        more: options of this command alone, as `option` makes them.
    """

    def command(context: typer.Context, config: Path | None, **given: object) -> int:
        others = {each.name: given.pop(each.name) for each in more}
        flags = {name: value for name, value in given.items() if _is_given(context, name)}
        try:
            outcome = read(flags, config)
            check_names(list(model_options(outcome.configuration)))
        except ConfigurationError as error:
            raise Misconfigured(str(error)) from None
        return run(outcome, **others)

    command.__doc__ = run.__doc__
    command.__name__ = run.__name__
    command.__annotations__ = {}
    command.__signature__ = inspect.Signature([*more, *_parameters()])  # type: ignore[attr-defined]
    return command


def option(name: str, annotation: object, default: object) -> inspect.Parameter:
    """An option beside the settings. Args: default: typer's `Option`."""
    return _parameter(name, default, annotation)


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _parameters() -> Iterator[inspect.Parameter]:
    yield _parameter("context", inspect.Parameter.empty, typer.Context)
    file = typer.Option(
        None,
        "--config",
        exists=True,
        dir_okay=False,
        help=f"A TOML file of settings (docs/configuration.md); also {FILE_VARIABLE}. By default the user's, "
        "if there is one.",
        rich_help_panel=GROUP,
    )
    yield _parameter("config", file, Path | None)
    for name in names():
        if about(name).flag:
            annotation, option = _option(name, Configuration.model_fields[name])
            yield _parameter(name, option, annotation)


def _parameter(name: str, default: object, annotation: object) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


def _option(name: str, field: FieldInfo) -> tuple[object, object]:
    """The type that typer is told, and its option."""
    told = about(name)
    annotation, metadata = plain(field.annotation)
    settings: dict[str, Any] = {
        "help": told.help,
        "metavar": told.metavar,
        "rich_help_panel": told.group.value,
    }
    for each in (*field.metadata, *metadata):
        if isinstance(each, annotated_types.Ge):
            settings["min"] = each.ge
        elif isinstance(each, annotated_types.Le):
            settings["max"] = each.le
        elif isinstance(each, AfterValidator) and isinstance(each.func, PathRule):
            rule = each.func
            settings |= {"exists": rule.exists, "file_okay": not rule.folder, "dir_okay": rule.folder}
    default = field.get_default(call_default_factory=True)
    if isinstance(default, tuple):
        default = list(default) or None
    return (annotation if default is not None else annotation | None), typer.Option(default, **settings)


def plain(annotation: Any) -> tuple[Any, list[object]]:
    """A type without None, secrecy and what was annotated within, and that."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner, metadata = plain(arguments[0])
        return inner, [*metadata, *arguments[1:]]
    if origin is tuple:
        inner, metadata = plain(arguments[0])
        return types.GenericAlias(list, (inner,)), metadata
    if origin in (types.UnionType, typing.Union):
        return plain(next(each for each in arguments if each is not type(None)))
    return (str if annotation is SecretStr else annotation), []
