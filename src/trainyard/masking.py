"""Finds passwords and keys in text, so that stored diffs of uncommitted code do not contain them."""

import re
from collections.abc import Iterator
from fnmatch import translate
from pathlib import Path
from typing import NamedTuple

_SHAPES = {
    "an AWS access key": r"\b((?:AKIA|ASIA)[0-9A-Z]{16})\b",
    "a GitHub token": r"\b(gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{30,})",
    "a Hugging Face token": r"\b(hf_[A-Za-z0-9]{16,})",
    "a GitLab token": r"\b(glpat-[\w-]{20,})",
    "a Slack token": r"\b(xox[abeoprs]-[A-Za-z0-9-]{10,})",
    "a Google API key": r"\b(AIza[\w-]{35})",
    "an API key": r"\b(sk-(?=[\w-]*\d)[\w-]{20,})",
    "a PyPI token": r"\b(pypi-[\w-]{50,})",
    "an npm token": r"\b(npm_[A-Za-z0-9]{36})",
    "a JSON web token": r"\b(eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]{8,})",
}
"""Recognisable formats of issuers: kind -> a pattern whose group is the secret."""

_PASSWORD = r"(?:pass(?:word|wd|phrase)|pwd|secret(?:[_-]?key)?)\d*"
_TOKEN = r"(?:token|credentials?|(?:api|auth|access|account|private)[_-]?key)\d*"
_ASSIGNED = r"[\"']?\]?\s*(?::=|=>|[:=])\s*"
_ASSIGNMENTS = {
    "a password": rf"(?i){_PASSWORD}{_ASSIGNED}[rbuf]?([\"'])(?![$<\[{{%])([^\s\"']{{4,}})\1",
    "a token": rf"(?i){_TOKEN}{_ASSIGNED}[rbuf]?([\"'])(?![$<\[{{%])((?=\S*\d)[^\s\"']{{8,}})\1",
    "a password in a URL": r"://()[^/\s:@\"']*:(?![$<{])([^/\s@\"']+)@",
    "a token in a URL": r"(?i)[?&]()(?:token|key|api_?key|sig|signature|password|secret)=(?![$<{])([^&\s\"']{8,})",
    "a bearer token": r"(?i)\bbearer()\s+((?=\S*\d)[\w.~+/=-]{16,})",
    "a key of 40 digits": r"(?i)(?:wandb|api|key|token|login)\b()[^\n]{0,30}?\b([0-9a-f]{40})\b",
    "a password option": r"(?i)--(?:password|passwd|token|secret|api-key)()[ =](?![$<{\"'])(\S{6,})",
}
"""Common ways to write a secret: kind -> a pattern whose second group is the secret."""

_SETTING = (
    rf"(?i)^\s*(?:export\s+|set\s+|env\s+|-\s+)?[\w.-]*(?:{_PASSWORD}|{_TOKEN})()"
    r"\s*[:=]\s*(?![$<\[{\"'!*&|>])(\S{4,})\s*$"
)
"""A line of a file of settings: a password without quotes. In Python it would be an expression."""

_KEY_BEGIN, _KEY_END = re.compile(r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY"), re.compile(r"-----END [A-Z0-9 ]*PRIVATE KEY")

_ANY_SHAPE = re.compile("|".join(_SHAPES.values()))  # one pass over a file that has none

_SECRET_FILES = "|".join(
    translate(name)
    for name in (
        *(".env", ".env.*", "*.env", ".netrc", "_netrc", ".npmrc", ".pypirc", ".pgpass", ".git-credentials"),
        *(".htpasswd", "id_rsa", "id_dsa", "id_ecdsa", "id_ed25519", "*.pem", "*.key", "*.p12", "*.pfx", "*.jks"),
        *("*.kdbx", "credentials", "credentials.json", "credentials.yaml", "secret.*", "secrets.*"),
        "service-account*.json",
    )
)
"""One pattern for all: each file and each line of a diff is compared with it."""

_BINARY_LOOKED_AT = 8192  # bytes in which a binary file has a zero


class Finding(NamedTuple):
    """One line that seems to contain a secret; never the secret."""

    place: str  # "<file>:<line>"; line 0: the whole file
    kind: str

    def __str__(self) -> str:
        return f"{self.place.removesuffix(':0')} ({self.kind})"


def mask_text(text: str) -> str:
    """Return a text with what looks like a secret replaced."""
    return "\n".join(_mask_line(line, is_code=True)[0] for line in text.split("\n"))


def mask_diff(diff: bytes) -> tuple[bytes, list[Finding]]:
    """Return git's diff with what looks like a secret replaced, and where that was.

    A masked diff has the same lines, but does not apply where a masked one is removed or is context.
    """
    masked, findings = [], []
    path, number, in_hunk, in_key = "", 0, False, False
    for line in diff.decode("latin-1").split("\n"):
        if line.startswith("diff --git "):
            path, number, in_hunk = line.rpartition(" b/")[2].rstrip('"'), 0, False
        elif hunk := re.match(r"@@ -\d+(?:,\d+)? \+(\d+)", line):
            number, in_hunk, in_key = int(hunk[1]), True, False
        elif line == "GIT binary patch":
            in_hunk = is_secret_file(path)
        elif in_hunk and line and line[0] != "\\":
            sign, rest = line[0], line[1:]
            rest, kind, in_key = _mask_content(rest, path, in_key=in_key)
            if kind:
                findings.append(Finding(f"{path}:{number}", kind))
            line = sign + rest
            number += sign != "-"
        masked.append(line)
    return "\n".join(masked).encode("latin-1"), findings


def find_secrets(folder: Path) -> Iterator[Finding]:
    """Yield files and lines of a folder that are certainly secret, by shape or file name; hidden ones are skipped.

    Args:
        folder: or a single file.
    """
    for path in sorted(folder.rglob("*")) if folder.is_dir() else [folder]:
        names = path.relative_to(folder).parts
        if not path.is_file() or any(name.startswith(".") or name == "__pycache__" for name in names):
            continue
        content = path.read_bytes()
        if is_secret_file(path.name):
            yield Finding(f"{path}:0", "a file of passwords or keys, by its name")
        elif b"\0" not in content[:_BINARY_LOOKED_AT]:
            text = content.decode("latin-1")
            is_suspect = _ANY_SHAPE.search(text) or _KEY_BEGIN.search(text)
            for number, line in enumerate(text.splitlines() if is_suspect else (), 1):
                if kind := _find_shape(line):
                    yield Finding(f"{path}:{number}", kind)


def is_secret_file(path: str) -> bool:
    """Return whether a file is known, by its name, to contain passwords or keys."""
    return re.match(_SECRET_FILES, Path(path).name) is not None


def _mask_content(line: str, path: str, *, in_key: bool) -> tuple[str, str, bool]:
    """Return a line of a file masked, the kind of secret or "", and whether the next line belongs to a private key."""
    if in_key or _KEY_BEGIN.search(line):
        return "<masked: a private key>", "" if in_key else "a private key", not _KEY_END.search(line)
    if is_secret_file(path) and line.strip():
        return "<masked: a file of secrets>", "a file of secrets", False
    masked, kind = _mask_line(line, is_code=path.endswith((".py", ".pyi", ".ipynb", ".md")))
    return masked, kind, False


def _mask_line(line: str, *, is_code: bool) -> tuple[str, str]:
    """Return a line with its secrets replaced, and the kind of the first; "" if it has none."""
    kinds = ""
    assignments = _ASSIGNMENTS if is_code else {**_ASSIGNMENTS, "a setting": _SETTING}
    for kind, pattern in [*_SHAPES.items(), *assignments.items()]:
        while (match := re.search(pattern, line)) and not match[match.lastindex or 0].startswith("<masked"):
            begin, end = match.span(match.lastindex or 0)
            line = f"{line[:begin]}<masked: {kind}>{line[end:]}"
            kinds = kinds or kind
    return line, kinds


def _find_shape(line: str) -> str:
    if _KEY_BEGIN.search(line):
        return "a private key"
    return next((kind for kind, pattern in _SHAPES.items() if re.search(pattern, line)), "")
