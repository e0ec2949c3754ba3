"""`chairlift warm`"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import httpx
import typer
from typer.exceptions import TyperException

from chairlift.server.security.keys import KeyFault, parse_key


def warm(
    file: Annotated[
        Path,
        typer.Argument(
            exists=True,
            dir_okay=False,
            help="What prompts are to begin with: a text, or with the ending .json a chat: its messages, or "
            "an object with messages and maybe tools.",
        ),
    ],
    url: Annotated[str, typer.Option(help="Where the server listens.")] = "http://127.0.0.1:8000",
    cache_salt: Annotated[
        str | None, typer.Option(help="As the requests have it.", show_default=False)
    ] = None,
    admin_key: Annotated[
        str | None,
        typer.Option(
            envvar="CHAIRLIFT_ADMIN_KEY",
            show_envvar=False,
            help="An admin's key, where the server has keys; also CHAIRLIFT_ADMIN_KEY.",
            show_default=False,
        ),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds that it may take.")] = 3600.0,
) -> int:
    """Have a running server compute a system prompt and keep it, so that requests begin behind it."""
    body = _body(file)
    if cache_salt is not None:
        body["cache_salt"] = cache_salt
    headers = {} if admin_key is None else {"Authorization": f"Bearer {_bare(admin_key)}"}
    try:
        answer = httpx.post(f"{url.rstrip('/')}/v1/cache/warm", json=body, headers=headers, timeout=timeout)
        told = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise TyperException(f"{url} does not answer as a Chairlift server: {error}") from None
    if answer.status_code != 200:
        refusal = told.get("error") if isinstance(told, dict) else None
        raise TyperException(str(refusal.get("message") if isinstance(refusal, dict) else told))
    typer.echo(f"{told['pinned_tokens']} of {told['tokens']} tokens are kept.")
    return 0


def _bare(key: str) -> str:
    """Of what the server takes, the first: `[NAME:]KEY,…`. Raises: TyperException: it is no key."""
    try:
        return parse_key(key.partition(",")[0], "--admin-key").secret
    except KeyFault as fault:
        raise TyperException(str(fault)) from None


def _body(file: Path) -> dict[str, object]:
    try:
        text = file.read_text(encoding="utf-8")
        if file.suffix != ".json":
            return {"prompt": text}
        chat = json.loads(text)
    except (OSError, ValueError) as error:
        raise TyperException(f"{file} cannot be read: {error}") from None
    if isinstance(chat, list):
        return {"messages": chat}
    if not isinstance(chat, dict):
        raise TyperException(f"{file} holds neither messages nor an object with messages.")
    return chat
