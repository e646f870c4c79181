"""What AWS's own tools take from the files of profiles, which the crate behind obstore does not read."""

from __future__ import annotations

import configparser
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerostart.errors import ConfigError

#: What says where credentials of AWS come from, other than a profile.
_GIVEN = (
    *("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_SKIP_SIGNATURE"),
    *("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI"),
)
#: What says where S3 is, by the environment.
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_KEYS = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
#: What of a profile only AWS's own library follows.
_FOLLOWED = ("role_arn", "sso_session", "sso_start_url", "credential_process", "login_session")


def settings_of(settings: Mapping[str, str]) -> dict[str, Any]:
    """Credentials, region and endpoint of the user's profile, which the crate does not read.

    Raises ConfigError for a profile that is not there, or that only boto3 follows, where that is not
    installed.
    """
    name, profile = _profile(settings)
    more: dict[str, Any] = {}
    if "region" in profile and not {"AWS_REGION", "AWS_DEFAULT_REGION"} & settings.keys():
        more["region"] = profile["region"]
    if (endpoint := profile.get("endpoint_url")) and not any(map(settings.get, _ENDPOINTS)):
        more["endpoint"] = endpoint
        if endpoint.startswith("http://"):
            more["client_options"] = {"allow_http": True}
    if any(given in settings for given in _GIVEN):
        return more
    if any(key in profile for key in _FOLLOWED):
        try:
            from obstore.auth.boto3 import Boto3CredentialProvider
        except ImportError as error:
            raise ConfigError(
                f"the AWS profile {name} gets its credentials by "
                f"{next(key for key in _FOLLOWED if key in profile)}, which boto3 does: pip install boto3, "
                "or give AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            ) from error
        return {**more, "credential_provider": Boto3CredentialProvider()}
    return more | {key.removeprefix("aws_"): profile[key] for key in _KEYS if key in profile}


def has_endpoint(settings: Mapping[str, str]) -> bool:
    """Whether the user has named a server of S3's other than AWS's. Raises ConfigError as ``settings_of``."""
    return any(map(settings.get, _ENDPOINTS)) or "endpoint_url" in _profile(settings)[1]


def _profile(settings: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """The name of the user's profile, and what it says."""
    name = settings.get("AWS_PROFILE") or settings.get("AWS_DEFAULT_PROFILE") or "default"
    asked = name != "default"
    profile: dict[str, str] = {}
    for variable, file, section in (
        ("AWS_CONFIG_FILE", "config", f"profile {name}" if asked else name),
        ("AWS_SHARED_CREDENTIALS_FILE", "credentials", name),
    ):
        parser = configparser.RawConfigParser()
        path = Path(settings.get(variable, f"~/.aws/{file}"))
        try:
            parser.read(path.expanduser(), encoding="utf-8")
        except RuntimeError:  # a user without a home, as in a container
            continue
        except (configparser.Error, UnicodeError):  # whose text may be a line with a key
            raise ConfigError(
                f"{path}: this is no file of AWS profiles; mend it, or unset {variable}"
            ) from None
        if parser.has_section(section):
            profile |= dict(parser.items(section))
        # An endpoint for S3 alone is in a section that the profile names.
        services = f"services {profile.get('services', '')}"
        if variable == "AWS_CONFIG_FILE" and parser.has_section(services):
            profile |= _nested(parser.get(services, "s3", fallback=""), "endpoint_url")
    if asked and not profile:
        raise ConfigError(f"AWS_PROFILE={name}: there is no such profile in ~/.aws/config or credentials")
    return name, profile


def _nested(text: str, key: str) -> dict[str, str]:
    """The line of ``key`` among settings that are indented below another's name."""
    pairs = (line.partition("=") for line in text.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs if name.strip() == key}
