"""Settings of who may ask, how much and how slowly; a part of `Configuration`."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, SecretStr, ValidationInfo, field_validator
from pydantic_settings import BaseSettings

from chairlift.server.configuration.about import About, Group
from chairlift.server.configuration.secrets import check_proxy, checked_keys
from chairlift.server.configuration.types import ONE_ALONE, ExistingFile
from chairlift.server.security.names import check_host_pattern, check_origin


class AccessFields(BaseSettings):
    api_key: Annotated[
        tuple[SecretStr, ...],
        ONE_ALONE,
        AfterValidator(checked_keys),
        About(
            Group.SECURITY,
            "A key that clients must send, or NAME:KEY; may be repeated. Other users of the machine see "
            "flags: a file or the environment is better (docs/security.md).",
            "[NAME:]KEY",
        ),
    ] = ()
    api_key_file: Annotated[
        tuple[ExistingFile, ...],
        ONE_ALONE,
        About(Group.SECURITY, "A file with such a key a line, that nobody else can read; may be repeated."),
    ] = ()
    admin_key: Annotated[
        tuple[SecretStr, ...],
        ONE_ALONE,
        AfterValidator(checked_keys),
        About(
            Group.SECURITY,
            "A key that may also do what concerns all clients, as clearing caches; may be repeated.",
            "[NAME:]KEY",
        ),
    ] = ()
    admin_key_file: Annotated[
        tuple[ExistingFile, ...], ONE_ALONE, About(Group.SECURITY, "A file with such keys; may be repeated.")
    ] = ()
    insecure: Annotated[
        bool, About(Group.SECURITY, "Listen where others can connect, without asking for a key.")
    ] = False
    metrics_public: Annotated[bool, About(Group.SECURITY, "/metrics needs no key.")] = False
    cors_origin: Annotated[
        tuple[Annotated[str, AfterValidator(check_origin)], ...],
        ONE_ALONE,
        About(
            Group.SECURITY,
            "An origin, such as https://chat.example.org, whose pages may use this server from a browser; * "
            "for all. May be repeated.",
        ),
    ] = ()
    allowed_host: Annotated[
        tuple[Annotated[str, AfterValidator(check_host_pattern)], ...],
        ONE_ALONE,
        About(
            Group.SECURITY,
            "A name, such as llm.example.org or *.example.org, under which this server is asked; others are "
            "refused, but for this machine's own and numeric addresses. May be repeated. By default every "
            "name, and none where only this machine can connect and there is no key.",
        ),
    ] = ()
    ssl_certfile: Annotated[
        ExistingFile | None,
        About(Group.SECURITY, "Speak TLS with the certificate, and those it rests on, in this PEM file."),
    ] = None
    ssl_keyfile: Annotated[
        ExistingFile | None, About(Group.SECURITY, "The certificate's private key, if in a file of its own.")
    ] = None
    ssl_keyfile_password: Annotated[
        SecretStr | None, About(Group.SECURITY, "Of the private key, if it is encrypted.")
    ] = None
    requests_per_minute: Annotated[
        int | None,
        Field(ge=1),
        About(Group.SECURITY, "Requests of each client, by its key, within a minute."),
    ] = None
    tokens_per_minute: Annotated[
        int | None,
        Field(ge=1),
        About(Group.SECURITY, "Tokens of each client's prompts and answers within a minute."),
    ] = None
    concurrent_requests: Annotated[
        int | None, Field(ge=1), About(Group.SECURITY, "Requests of each client that are answered at once.")
    ] = None
    prefix_cache_per_key: Annotated[
        bool,
        About(
            Group.SECURITY,
            "Kept prefixes serve only the client that brought them, so that none can tell by the time of an "
            "answer what others have asked.",
        ),
    ] = False
    header_timeout: Annotated[
        float, Field(ge=0.1), About(Group.SECURITY, "Seconds in which a request's head must be whole.")
    ] = 30.0
    header_limit: Annotated[
        float, Field(ge=1, le=1024), About(Group.SECURITY, "Largest head of a request, in KiB.")
    ] = 32.0
    body_timeout: Annotated[
        float,
        Field(ge=0.1),
        About(Group.SECURITY, "Seconds for which nothing of a body may come; later on, 1 KiB a second must."),
    ] = 30.0
    keep_alive_timeout: Annotated[
        int,
        Field(ge=1),
        About(
            Group.SECURITY,
            "Seconds that a connection without a request is kept; behind a proxy more than it keeps its own.",
        ),
    ] = 20
    send_timeout: Annotated[
        float,
        Field(ge=1),
        About(Group.SECURITY, "Seconds that a client may take to read what waits for it."),
    ] = 60.0
    forwarded_allow_ips: Annotated[
        tuple[Annotated[str, AfterValidator(check_proxy)], ...],
        ONE_ALONE,
        About(
            Group.SECURITY,
            "Address or network of a proxy whose X-Forwarded-For and X-Forwarded-Proto are believed; may be "
            "repeated. None by default.",
        ),
    ] = ()

    @field_validator("ssl_keyfile", "ssl_keyfile_password")
    @classmethod
    def _key_with_certificate(cls, value: object, info: ValidationInfo) -> object:
        if value is not None and info.data.get("ssl_certfile") is None:
            raise ValueError("It needs --ssl-certfile.")
        return value
