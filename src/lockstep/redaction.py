"""Redaction: the removal of secrets from records, reports and text for bug reports.

    {"api_key": "abc", "lr": 0.1}            the name of a secret
    ["train.py", "--token", "abc"]           an option and its value
    "postgresql://me:abc@host/db?sig=abc"    credentials and parameters of a URL
    "hf_abcdefghijklmnopqrst"                the formats of well-known services
    any occurrence of $HF_TOKEN's value      secrets that this process's environment holds

become "[redacted]". Names such as "password" or "api_key" hide every value. Names such as
"token" or "key" hide only strings that do not look like a setting, because models have tokens
and dictionaries have keys.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping, Set
from typing import Any

__all__ = ["MARK", "may_be_secret", "redact"]

MARK = "[redacted]"

# Found anywhere in a name, without its separators: the value is a secret.
STRONG = (
    "password", "passwd", "passphrase", "secret", "credential", "authorization", "bearer",
    "cookie", "jwt", "webhook", "apikey", "accesskey", "privatekey", "accountkey", "storagekey",
    "signingkey", "encryptionkey", "masterkey", "licensekey", "driverkey", "authkey",
    "authtoken", "accesstoken", "apitoken",
)  # fmt: skip
# As the last word of a name: a string is a secret unless it is a number.
WEAK = {"token", "pass", "pwd", "auth", "oauth", "sig", "signature", "psk", "dsn"}
# As any word of a name: a string that looks random is a secret.
HINTS = WEAK | {"key", "keys", "tokens", "session", "sid", "pin", "otp", "nonce", "salt"}
# Tokens of a vocabulary.
VOCABULARY = {"pad", "bos", "eos", "unk", "cls", "sep", "mask", "special", "stop", "start", "end"}

FORMATS = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
    r"|\b(?:"
    r"eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"  # JSON web tokens
    r"|(?:hf|npm|gh[pousr]|github_pat|wandb_v\d|dop_v\d|[rs]k_live|[rs]k_test)_\w{16,}"
    r"|(?:glpat|pypi|nvapi|xox[a-z])-[\w-]{12,}"
    r"|sk-(?=[\w-]{0,32}\d)[\w-]{16,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[\w-]{30,}|ya29\.[\w-]{16,}"
    r"|[Bb]earer\s+[\w.~+/=-]{8,}|Basic\s+[\w.~+/-]{8,}={1,2}"
    r")"
    # The user and the password of a URL, or a token in place of both.
    r"|(?<=://)[^\s/?#\"'<>:]*:[^\s/?#\"'<>]*(?=@)"
    r"|(?:(?<=http://)|(?<=https://))[^\s/?#\"'<>]+(?=@)"
)
# A name and the separator between it and its value: "=", ":", or for an option a space.
NAMED = re.compile(r"""(?<![\w.-])([\w.-]++)(["']?\s*+(?:=|:(?!//))\s*+|(?:["'],)?\s++)""")
VALUE = re.compile(r""""(?:[^"\\]|\\.)*+"?|'(?:[^'\\]|\\.)*+'?|\S++""")
OPTION = re.compile(r"--?[A-Za-z][\w.-]*")
SETTING = re.compile(r"(?P<name>[\w.+-]+)=(?P<value>.*)", re.DOTALL)
NUMBER = re.compile(r"[+-]?\d{0,7}(?:\.\d*)?(?:[eE][+-]?\d+)?")
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
PIECE = re.compile(r"(?<![a-zA-Z0-9])(?=[a-zA-Z]*\d)(?=\d*[a-zA-Z])[a-zA-Z0-9]{8,}")
PRIVATE = re.compile(r"PW|LOGIN|CRED|USER|ACCOUNT|MAIL")  # in names of variables
DEEPEST = 32  # containers within containers; deeper ones, and cycles, become text


def redact(value: Any, name: str = "") -> Any:
    """Return `value` with every secret in it replaced by "[redacted]".

    Mappings, sequences, sets and dataclasses are searched and returned as dictionaries and
    lists. Any other object is returned unchanged, or as redacted text if its text contains a
    secret.

    Args:
        value: A value that will be written or shown.
        name: The value's name, for example that of an environment variable.
    """
    return _redact(value, name, _held(os.environ), 0)


def may_be_secret(name: str, value: str) -> bool:
    """Return whether a variable may hold a secret, so that it should not be recorded.

    True if its name hints at a secret (API_KEY, LOGIN, PIN), if its value looks random, or if
    `redact` finds a secret in the value.
    """
    is_private = _is_strong(name) or _is_hint(name) or PRIVATE.search(name) is not None
    return is_private or _looks_random(value) or redact(value, name) != value


def _redact(value: Any, name: str, held: list[str], depth: int) -> Any:
    if value is None or isinstance(value, bool) or value == "":
        return value
    if _is_strong(name):
        return MARK
    if isinstance(value, (int, float)):
        return value
    if isinstance(value, str):
        return MARK if _is_secret(name, value) else _redact_text(value, held)
    if depth >= DEEPEST:
        return _redact_text(str(value), held)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif hasattr(value, "_asdict"):  # a named tuple
        value = value._asdict()
    if isinstance(value, Mapping):
        return {
            _redact_text(key, held) if isinstance(key, str) else key: _redact(
                entry, str(key), held, depth + 1
            )
            for key, entry in value.items()
        }
    if isinstance(value, (list, tuple, Set)):
        return _redact_list(list(value), name, held, depth)
    if hasattr(value, "tolist"):  # a tensor or an array
        return value
    text = str(value)
    redacted = _redact_text(text, held)
    return value if redacted == text else redacted


def _redact_list(values: list[Any], name: str, held: list[str], depth: int) -> list[Any]:
    """Redact a list, which may be a command line: an option's value is the next element."""
    redacted: list[Any] = []
    option = ""
    for value in values:
        setting = SETTING.fullmatch(value) if isinstance(value, str) else None
        if option and not str(value).startswith("--") and _is_secret(option, str(value)):
            redacted.append(MARK)
        elif setting and _is_secret(setting["name"], setting["value"]):
            redacted.append(f"{setting['name']}={MARK}")
        else:
            redacted.append(_redact(value, name, held, depth + 1))
        option = value if isinstance(value, str) and OPTION.fullmatch(value) else ""
    return redacted


def _redact_text(text: str, held: list[str]) -> str:
    """Redact secrets anywhere in a text."""
    for secret in held:
        text = text.replace(secret, MARK)
    return _redact_named(FORMATS.sub(MARK, text))


def _redact_named(text: str) -> str:
    """Redact "name=value", "name: value" and "--name value" within a text."""
    parts = []
    at = 0
    for match in NAMED.finditer(text):
        name, sign = match.groups()
        if match.start() < at or not (_is_strong(name) or _is_hint(name)):
            continue
        value = VALUE.match(text, match.end())
        if value is None or value[0].startswith(MARK):
            continue
        shown = value[0].strip("\"'")
        if value[0] == shown and not _is_strong(name):
            shown = re.split(r"[,;&)\]}]", shown, maxsplit=1)[0]
        if _names_secret(name, sign, shown):
            begin = value.start() + value[0].find(shown)
            parts += [text[at:begin], MARK]
            at = begin + len(shown)
    return "".join(parts) + text[at:]


def _names_secret(name: str, sign: str, value: str) -> bool:
    """Return whether a name, the separator after it and a value within a text are a secret."""
    if not sign.strip("\"', \t\r\n"):
        return name.startswith("-") and not value.startswith("-") and _is_secret(name, value)
    if ":" in sign and sign[0] not in "\"'":  # prose, such as "unexpected token: x"
        return _is_strong(name) or (_is_hint(name) and _looks_random(value))
    return _is_secret(name, value)


def _held(environ: Mapping[str, str]) -> list[str]:
    """Return the secrets that an environment holds, the longest first."""
    secrets = {
        value
        for name, value in environ.items()
        if len(value) >= 8 and (_is_strong(name) or (_is_hint(name) and _looks_random(value)))
    }
    return sorted(secrets, key=len, reverse=True)


def _is_secret(name: str, value: str) -> bool:
    """Return whether `value` is a secret if its name is `name`."""
    if not value or value == MARK:
        return False
    words = [word.lower() for word in WORD.findall(name)]
    if _is_strong(name) or not HINTS.intersection(words):
        return _is_strong(name)
    if words[-1] in WEAK and not VOCABULARY.intersection(words):
        return not NUMBER.fullmatch(value) and not re.fullmatch(r"[<\[].*[>\]]", value)
    return _looks_random(value)


def _is_strong(name: str) -> bool:
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    return any(word in plain for word in STRONG)


def _is_hint(name: str) -> bool:
    return bool(HINTS.intersection(word.lower() for word in WORD.findall(name)))


def _looks_random(value: str) -> bool:
    """Return whether a text looks random: long, with letters and digits in one piece."""
    is_path = value.startswith(("/", ".", "~"))
    return len(value) >= 16 and not is_path and PIECE.search(value) is not None
