"""From profile files, flags and --set to one ServeConfig, with the source of every value.

Precedence: default < profile < environment < flags and --set, of which one may set a field. Unknown keys are errors that suggest the
nearest known one.
"""

import difflib
import math
import os.path
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal, get_args, get_origin

from revolta_serve.config import Entry, ServeConfig, get, options, with_value
from revolta_serve.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Loaded:
    """A validated configuration and, for each field that is not a default, where its value came from."""

    config: ServeConfig
    sources: Mapping[str, str]

    def table(self) -> list[tuple[str, str, str]]:
        """(section.key, value, source) of every field; secrets are counted, not shown."""
        rows = []
        for entry in options():
            value = get(self.config, entry.path)
            shown = f"{len(value)} set" if entry.secret else str(value)
            rows.append((entry.path, shown, self.sources.get(entry.path, "default")))
        return rows


def names() -> list[str]:
    """Profiles that ship with the package, sorted."""
    folder = resources.files("revolta_serve") / "profiles"
    return sorted(item.name.removesuffix(".toml") for item in folder.iterdir() if item.name.endswith(".toml"))


def load(
    profile: str = "", flags: Mapping[str, Any] | None = None, sets: Sequence[str] = (), *, key: str | None = None, variable: str = ""
) -> Loaded:
    """Build and validate a configuration.

    profile: name of a shipped profile or path of a TOML file; empty for none. flags: section.key -> typed value.
    sets: `section.key=value` texts. key: an api key, and variable: the environment variable it is from. Raises ConfigError naming the
    place of the first mistake.
    """
    entries = {entry.path: entry for entry in options()}
    config, sources = ServeConfig(), dict[str, str]()
    given = [(path, value, entries[_known(path, "argument", entries)].flag or "argument") for path, value in (flags or {}).items()]
    given += [_read_set(text, entries) for text in sets]
    _check_once(given, entries)
    layers = [*_read_profile(profile, entries)] if profile else []
    layers += [] if key is None else [("api.keys", (key,), variable)]
    for path, value, source in layers + given:
        config = with_value(config, path, coerce(entries[path], value, source))
        sources[path] = source
    try:
        config.validate()
    except ConfigError as error:
        origins = [f"{path} is from {source}" for path, source in sources.items() if re.search(rf"\b{re.escape(path)}\b", error.message)]
        raise ConfigError(f"{error.message} ({', '.join(origins)})" if origins else error.message, param=error.param) from error
    return Loaded(config, sources)


def _check_once(given: Sequence[tuple[str, Any, str]], entries: Mapping[str, Entry]) -> None:
    """Of two values for one field on a command line nobody can tell which was meant."""
    seen: dict[str, tuple[Any, str]] = {}
    for path, value, source in given:
        if path in seen:
            earlier, place = seen[path]
            values = "" if entries[path].secret else f", {earlier!r} and {value!r}"
            raise ConfigError(f"{path} is given twice, by {place} and by {source}{values}; give it once")
        seen[path] = value, source


def coerce(entry: Entry, value: Any, source: str) -> Any:
    """Return value as the type of the field, or raise ConfigError naming the source, the field and the accepted form."""
    kind = entry.kind
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        if value in choices:
            return value
        raise ConfigError(f"{source}: {entry.path}={value!r} is none of {', '.join(choices)}{_nearest(str(value), choices)}")
    if get_origin(kind) is tuple:
        if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
            return tuple(value)
        raise ConfigError(f"{source}: {entry.path}={value!r} is not a list of strings")
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    if kind is not float and isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    raise ConfigError(f"{source}: {entry.path}={value!r} is not {'an' if kind is int else 'a'} {kind.__name__}")


def _read_profile(profile: str, entries: Mapping[str, Entry]) -> list[tuple[str, Any, str]]:
    if profile.endswith(".toml") or os.path.sep in profile:
        try:
            with open(profile, encoding="utf-8") as file:
                text = file.read()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"profile {profile}: cannot be read ({error})") from error
        label = os.path.basename(profile)
    else:
        if profile not in names():
            known = ", ".join(names())
            raise ConfigError(f"profile {profile!r} does not exist{_nearest(profile, names())}; known: {known}, or the path of a file")
        text = (resources.files("revolta_serve") / "profiles" / f"{profile}.toml").read_text("utf-8")
        label = f"{profile}.toml"
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{label}: is not TOML ({error})") from error
    layers = []
    for section, table in tables.items():
        if not isinstance(table, dict):
            raise ConfigError(f"{_place(label, text, section)}: {section} stands outside a section; write it under [section]")
        for key, value in table.items():
            place = _place(label, text, key, section)
            layers.append((_known(f"{section}.{key}", place, entries), value, place))
    return layers


def _read_set(text: str, entries: Mapping[str, Entry]) -> tuple[str, Any, str]:
    path, equals, raw = text.partition("=")
    if not equals:
        raise ConfigError(f"--set {text}: write section.key=value")
    path = _known(path.strip(), "--set", entries)
    kind = entries[path].kind
    if kind is str or get_origin(kind) is Literal:
        return path, raw, "--set"
    if get_origin(kind) is tuple and not raw.lstrip().startswith("["):
        return path, [item for item in raw.split(",") if item], "--set"
    try:
        return path, tomllib.loads(f"value = {raw}")["value"], "--set"
    except tomllib.TOMLDecodeError:
        return path, raw, "--set"


def _known(path: str, place: str, entries: Mapping[str, Entry]) -> str:
    if path in entries:
        return path
    section, _, key = path.partition(".")
    sections = {entry.partition(".")[0] for entry in entries}
    if section not in sections:
        known = ", ".join(sorted(sections))
        raise ConfigError(f"{place}: there is no section [{section}]{_nearest(section, sections)}; sections are {known}")
    keys = [entry.partition(".")[2] for entry in entries if entry.startswith(f"{section}.")]
    raise ConfigError(f"{place}: {path} is not a field of [{section}]{_nearest(key, keys)}; it has {', '.join(sorted(keys))}")


def _nearest(word: str, known: Sequence[str] | set[str]) -> str:
    found = difflib.get_close_matches(word, sorted(known), n=1, cutoff=0.5)
    return f"; did you mean {found[0]}?" if found else ""


def _place(label: str, text: str, key: str, section: str = "") -> str:
    """label:line of a key, found in the text because the TOML reader keeps no positions; label alone where the spelling is unusual."""
    inside = ""
    for number, line in enumerate(text.splitlines(), 1):
        header = re.match(r"\s*\[\s*([\w-]+)\s*\]", line)
        if header:
            inside = header[1]
        if inside == section and re.match(rf"\s*[\"']?{re.escape(key)}[\"']?\s*=", line):
            return f"{label}:{number}"
    return label
