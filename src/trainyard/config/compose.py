"""Composes a preset and overrides into one typed configuration, with Hydra; saves and loads a run's.

Reports an error in a preset or an override in one sentence. Loads no torch, h5py or DALI.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, is_dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf import resolvers as omegaconf_resolvers
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationResolutionError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)
from yaml import YAMLError  # type: ignore[import-untyped]

from trainyard.config.families import find_preset, load_family
from trainyard.config.frozen import LOCATION, read_frozen, write_frozen
from trainyard.config.settings import TrainConfig, check
from trainyard.errors import ConfigError, UserError
from trainyard.text import find_nearest

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

SCHEMA = "schema"
"""Name of a family's options in the defaults of its presets."""

_SET_BY_PRESET = ("job", "family")

_TYPE_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


class Option(NamedTuple):
    """One option of a configuration."""

    name: str  # dotted, as typed
    value: Any
    doc: str
    choices: tuple[str, ...]  # the allowed words; (): any value of the type
    mutable: bool  # whether a resumed run may change it: it, or one of its groups, is declared so


class Difference(NamedTuple):
    """One option whose value differs between two configurations."""

    name: str
    old: Any
    new: Any
    mutable: bool  # as of `Option`


def compose(job: str, overrides: Sequence[str], jobs_dir: Path) -> TrainConfig:
    """Return the checked configuration of a preset with overrides such as `optimizer.lr=1e-4` applied.

    Values use Hydra's syntax, with two differences. The value of a free-text option (a path, a column name) is taken
    verbatim, with its spaces, commas and equal signs. So is each text of a list, such as `[depth (cm),1e3,007]`; one
    with a comma, a double quote, or a bracket unlike those needs quotes. Takes about 0.1 s.

    Raises:
        ConfigError: an unknown job or option, a value of the wrong type or out of range, a malformed override, or a
            preset that does not compose.
        UserError: `jobs_dir` or the family's `config.py` is invalid.
    """
    return next(compose_each(job, overrides, [()], jobs_dir))


def compose_each(
    job: str, overrides: Sequence[str], variants: Iterable[Sequence[str]], jobs_dir: Path
) -> Iterator[TrainConfig]:
    """Yield what `compose` returns with the overrides of each variant after the others; reads the preset once.

    Args:
        variants: each sets the same options.
    """
    preset = find_preset(job, jobs_dir)
    family = preset.parent.name
    config_type = load_family(jobs_dir, family, "config").Config
    tree = _compose_tree(preset, config_type)
    tree.job, tree.family = job, family
    declared = dict(_walk_declarations(tree))
    _override_tree(tree, overrides, declared)
    for own in variants:
        _override_tree(tree, own, declared)
        yield _convert_tree(tree, f"job {job}", declared)


def apply_overrides(config: TrainConfig, overrides: Sequence[str]) -> TrainConfig:
    """Return a copy of `config` with overrides applied, read and checked as `compose` does.

    Raises:
        ConfigError: as for `compose`.
    """
    tree = OmegaConf.structured(config)
    declared = dict(_walk_declarations(tree))
    _override_tree(tree, overrides, declared)
    return _convert_tree(tree, f"job {config.job}", declared)


def list_options(config: Any, group: str = "", mutable: bool = False) -> Iterator[Option]:
    """Yield every option, in the order of declaration.

    Args:
        config: a configuration, or the group of options of that name in it.
        mutable: whether the group is declared so.
    """
    for f in fields(config):
        value, name = getattr(config, f.name), group + f.name
        is_mutable = mutable or bool(f.metadata.get("mutable_on_resume"))
        if is_dataclass(value):
            yield from list_options(value, f"{name}.", is_mutable)
        else:
            yield Option(name, value, f.metadata.get("doc", ""), f.metadata.get("choices", ()), is_mutable)


def find_differences(old: TrainConfig, new: TrainConfig) -> list[Difference]:
    """Return the options whose values differ."""
    assert type(old) is type(new), "configurations of one family"
    return [
        Difference(a.name, a.value, b.value, a.mutable)
        for a, b in zip(list_options(old), list_options(new), strict=True)
        if a.value != b.value
    ]


def list_kept_options(config: TrainConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return all options by dotted name: those that a run keeps, and those that may change when it is resumed."""
    options = list(list_options(config))
    kept = {option.name: option.value for option in options if not option.mutable and option.name != LOCATION}
    return kept, {option.name: option.value for option in options if option.name not in kept}


def save_config(config: TrainConfig, path: Path) -> None:
    """Write every option with its value to `path` as YAML, atomically."""
    write_frozen(asdict(config), path)


def load_config(path: Path, jobs_dir: Path) -> TrainConfig:
    """Read what `save_config` wrote. An option added since then takes its default.

    Raises:
        ConfigError: no such file, invalid YAML, more than plain values, an option that the family no longer has, or a
            value out of range.
        UserError: the family is not in `jobs_dir`.
    """
    frozen = read_frozen(path)
    if not isinstance(frozen, dict) or not frozen.get("family"):
        raise ConfigError(f"{path}: expected the options of a run, including 'family'. The file was changed.")
    family = str(frozen["family"])
    if not re.fullmatch(r"[A-Za-z]\w*", family, re.ASCII):
        raise ConfigError(f"{path}: '{family[:40]}' is not the name of a family. The file was changed.")
    config_type = load_family(jobs_dir, family, "config").Config
    tree = _merge_frozen(path, frozen, config_type)
    return _convert_tree(tree, str(path), dict(_walk_declarations(tree)))


# Presets


def _compose_tree(preset: Path, config_type: type[TrainConfig]) -> DictConfig:
    """Have Hydra merge a preset with those it is based on. Values are typed; interpolations are not resolved.

    Raises:
        ConfigError: the preset does not compose.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException

    register_options(config_type)
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(preset.parent.resolve()), version_base="1.3"):
            tree = hydra_compose(preset.stem)
    except YAMLError as error:
        raise ConfigError(_describe_yaml_error(preset, error)) from None
    except (HydraException, OmegaConfBaseException, ValueError, OSError) as error:
        raise ConfigError(_describe_preset_error(preset, error, OmegaConf.structured(config_type))) from None
    if OmegaConf.get_type(tree) is not config_type:
        raise ConfigError(
            f"{preset}: is not based on the options of its family. The base preset begins with "
            f"'defaults: [schema, _self_]', all others with 'defaults: [{preset.parent.name}, _self_]'."
        )
    return tree


def _merge_frozen(path: Path, values: Mapping[str, Any], config_type: type[TrainConfig]) -> DictConfig:
    """Return the typed tree of frozen options.

    Raises:
        ConfigError: the family has no such option, or it is of another type.
    """
    try:
        tree = OmegaConf.merge(OmegaConf.structured(config_type), values)
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"{path}: {_describe_error(error, OmegaConf.structured(config_type))} The run was created by another "
            f"version of family '{values['family']}'. Resume it with the code that started it (its commit is in "
            "env.json)."
        ) from None
    assert isinstance(tree, DictConfig)
    return tree


def resolve(tree: DictConfig, where: str) -> TrainConfig:
    """Return the values of a typed tree, with its interpolations resolved; `where` begins the message of an error.

    Raises:
        ConfigError: a value is missing or of the wrong type, or an interpolation leads nowhere or to the environment.
    """
    with _forbid_environment() as variables:
        try:
            config = OmegaConf.to_object(tree)
        except OmegaConfBaseException as error:
            if variables:
                words = _describe_environment_use(error.full_key or "an option", variable=variables[0])
            else:
                words = _describe_error(error, tree)
            raise ConfigError(f"{where}: {words}") from None
    assert isinstance(config, TrainConfig)
    return config


def register_options(config_type: type[TrainConfig]) -> None:
    """Register the options of a family with Hydra; its base preset names them `schema`."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name=SCHEMA, node=config_type)


def _describe_yaml_error(path: Path, error: YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return f"{path}: not YAML: {_take_first_line(error)}."
    return f"{mark.name}, line {mark.line + 1}: not YAML: {getattr(error, 'problem', None) or 'cannot be read'}."


def _describe_preset_error(preset: Path, error: Exception, schema: DictConfig) -> str:
    """Name the preset in the chain of defaults that failed to compose, and the reason."""
    from hydra.errors import MissingConfigException

    where = re.match(r"In '([^']+)': ", str(error))  # Hydra 1.3 names the preset only in this prefix
    path = preset.with_name(f"{where[1]}.yaml") if where else preset
    if isinstance(error, MissingConfigException):
        others = sorted(p.stem for p in preset.parent.glob("*.yaml") if p != path)
        return (
            f"{path}: its defaults name '{error.missing_cfg_file}', which is not a preset of this family. "
            f"Expected schema or one of: {', '.join(others)}."
        )
    if isinstance(error.__context__, OmegaConfBaseException):
        return f"{path}: {_describe_error(error.__context__, schema)}"
    return f"{path}: {_take_first_line(error)}."


# Overrides


def _override_tree(tree: DictConfig, overrides: Sequence[str], declared: "Mapping[str, _Declaration]") -> None:
    """Set the options of a typed tree that were typed, such as `optimizer.lr=1e-4`.

    Raises:
        ConfigError: an unknown option, a value of the wrong type, or a malformed override.
    """
    for override in overrides:
        name, equals, text = override.partition("=")
        if not equals or not re.fullmatch(r"[\w.]+", name):
            raise ConfigError(
                f"'{override}' is not an override. Write option=value, such as optimizer.lr=1e-4, without spaces "
                "around the equal sign and without a prefix."
            )
        if name in _SET_BY_PRESET:
            raise ConfigError(f"{override}: '{name}' is set by the preset. Choose another job instead.")
        if name not in declared:
            raise ConfigError(f"{override}: {_describe_unknown(name, tree, declared, value=text)}")
        _set(tree, name, text, declared[name])


def _set(tree: DictConfig, name: str, text: str, declared: "_Declaration") -> None:
    from hydra.errors import HydraException

    try:
        OmegaConf.update(tree, name, declared.parse(name, text), force_add=False)
    except ConfigError:
        raise
    except (HydraException, OmegaConfBaseException, ValueError, OverflowError):  # the last two: too many digits
        raise ConfigError(f"{name}={text}: expected {declared.describe()}, found '{text}'.") from None


@dataclass(frozen=True)
class _Declaration:
    """Type and metadata of an option."""

    hint: Any  # its type
    metadata: Mapping[str, Any]

    def parse(self, name: str, text: str) -> Any:
        """Parse the text after the equal sign into a value that OmegaConf converts to the option's type.

        Raises:
            ConfigError: the text contains several values.
            HydraException: it does not match Hydra's grammar.
        """
        quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
        is_word = bool(self.metadata.get("choices") or self.metadata.get("duration"))
        if self.hint is str and not quoted and not is_word:
            return text
        if self.hint == list[str] and _LIST_OF_TEXTS.fullmatch(text):
            return [_read_listed_text(match[0].strip()) for match in _LISTED_TEXT.finditer(text[1:-1])]
        parsed = _parse_with_hydra(name, text)
        if parsed.is_sweep_override():
            raise ConfigError(f"{name}={text}: several values, but this is one run. Start one run per value.")
        return text if self.hint is str and not quoted else parsed.value()

    def accepts(self, value: Any) -> bool:
        """Return whether list elements have the declared type: OmegaConf 2.3 accepts a list nested in a list."""
        if get_origin(self.hint) is not list:
            return True
        (element,) = get_args(self.hint)
        return element not in _TYPE_WORDS or all(isinstance(item, element) for item in value)

    def describe(self) -> str:
        if self.hint in _TYPE_WORDS:
            return f"{_TYPE_WORDS[self.hint]} ({self.hint.__name__})"
        if self.metadata.get("per_channel"):
            return "a number, or a list with one per channel such as [0.5,0.5,0.5]"
        if get_origin(self.hint) is list:
            return f"a list such as [a,b], each {_TYPE_WORDS.get(get_args(self.hint)[0], 'of its type')}"
        return str(self.hint)


_LISTED_TEXT = re.compile(
    r"""\s* (?:
    "(?: [^"\\] | \\. )*" \s*
    | '(?: [^'\\] | \\. )*' \s*
    | (?! [\s'] ) (?: \\. | \$\{ [^{}]* \} | \( [^,"()\[\]{}]* \) | [^\\,"()\[\]{}] )+
)""",
    re.VERBOSE,
)
"""One text of a list: in quotes; or without a comma, a double quote, or a bracket other than `(cm)` and `${option}`."""

_LIST_OF_TEXTS = re.compile(rf"\[\s*({_LISTED_TEXT.pattern}(,{_LISTED_TEXT.pattern})*)?\]", re.VERBOSE)


def _read_listed_text(text: str) -> str:
    """Parse one text of a list: quotes and backslashes as Hydra reads them, all else verbatim."""
    if text[0] in "'\"":
        return str(_parse_with_hydra("text", text).value())
    return re.sub(r"\\([\\()\[\]{}:=, \t])", r"\1", text)


def _parse_with_hydra(name: str, text: str) -> "Override":
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return OverridesParser.create().parse_override(f"{name}={text}")


def _walk_declarations(tree: DictConfig, prefix: str = "") -> Iterator[tuple[str, _Declaration]]:
    """Yield the dotted name and the declaration of every option of a typed tree."""
    kind = OmegaConf.get_type(tree)
    assert kind is not None and is_dataclass(kind)
    hints = get_type_hints(kind)
    for f in fields(kind):
        if is_dataclass(OmegaConf.get_type(tree, f.name)):
            yield from _walk_declarations(tree[f.name], f"{prefix}{f.name}.")
        else:
            yield prefix + f.name, _Declaration(hints[f.name], f.metadata)


_ELSEWHERE = {
    **dict.fromkeys(("epochs", "num_epochs", "max_epochs"), "max_duration={}ep"),
    **dict.fromkeys(("steps", "num_steps", "max_steps", "iterations"), "max_duration={}st"),
    **dict.fromkeys(("batch_size", "batch", "bs"), "global_batch_size={}"),
    **dict.fromkeys(("learning_rate", "base_lr", "max_lr"), "optimizer.lr={}"),
    **dict.fromkeys(("wd", "decay"), "optimizer.weight_decay={}"),
    **dict.fromkeys(("momentum", "betas"), "optimizer.beta1={}"),
    **dict.fromkeys(("grad_clip", "max_grad_norm", "gradient_clip_val"), "clip_grad_norm={}"),
    **dict.fromkeys(("dtype", "amp"), "precision={}"),
    "warmup_steps": "schedule.warmup={}st",
    "warmup_epochs": "schedule.warmup={}ep",
}
"""Names of options in other tools -> the option here, with the value that was typed."""

_SHORT_GROUP = 12
"""Options of a group that an error lists; of a larger group it names the command that lists them."""


def _describe_unknown(name: str, tree: DictConfig, known: Iterable[str], *, value: str = "") -> str:
    """Return a sentence about an unknown option: the nearest names, and those of its group."""
    below = [option for option in known if option.startswith(f"{name}.")]
    if below:
        return f"'{name}' is a group of options. Set one of: {', '.join(below)}."
    group, _, leaf = name.rpartition(".")
    while not (siblings := _list_group(group, known)):
        group = group.rpartition(".")[0]
    if same_leaf := [option for option in known if option.rpartition(".")[2] == leaf]:
        near = find_nearest(name, same_leaf, most=3, similarity=0.0)
    elif leaf in _ELSEWHERE:
        near = [_ELSEWHERE[leaf].format(value or "...")]
    elif group and name == f"{group}.{leaf}":
        near = [f"{group}.{option}" for option in find_nearest(leaf, siblings, most=3, similarity=0.5)]
    else:
        near = find_nearest(name, known, most=3)
    hint = f" Nearest: {', '.join(near)}." if near else ""
    valid = f"Valid in {group}: {', '.join(siblings)}"
    if not group or len(siblings) > _SHORT_GROUP:
        valid = f"All: trainyard options {OmegaConf.select(tree, 'job') or 'JOB'}"
    return f"there is no option '{name}'.{hint} {valid}."


def _list_group(group: str, known: Iterable[str]) -> list[str]:
    """Return the names directly below a group ("" is the top level), without duplicates."""
    prefix = f"{group}." if group else ""
    return list(dict.fromkeys(name[len(prefix) :].partition(".")[0] for name in known if name.startswith(prefix)))


# From OmegaConf to dataclasses


def _convert_tree(tree: DictConfig, where: str, declarations: "Mapping[str, _Declaration]") -> TrainConfig:
    """Return the checked values of a typed tree; `where` begins the message of an error.

    Raises:
        ConfigError: as for `resolve`, and a value that is out of range.
    """
    config = resolve(tree, where)
    for name, declared in declarations.items():
        value = attrgetter(name)(config)
        if not declared.accepts(value):
            raise ConfigError(f"{where}: {name}={value}: expected {declared.describe()}.")
    try:
        check(config)
    except UserError as error:
        raise ConfigError(f"{where}: {error}") from None
    return config


def _describe_error(error: OmegaConfBaseException, tree: DictConfig) -> str:
    """Describe an OmegaConf error in one sentence that names the option."""
    name = error.full_key or ""
    declared = dict(_walk_declarations(tree))
    if isinstance(error, ConfigKeyError | ConfigAttributeError) and name not in declared:
        return _describe_unknown(name, tree, declared)
    if isinstance(error, MissingMandatoryValue):
        return f"'{name}' must be given: {name}=<value>."
    if isinstance(error, InterpolationResolutionError):
        return f"{name}: {_take_first_line(error)}. '${{...}}' names another option; write the value itself."
    if name not in declared:
        return f"{f'{name}: ' if name else ''}{_take_first_line(error)}."
    return f"{name}: expected {declared[name].describe()}. {_take_first_line(error)}."


@contextmanager
def _forbid_environment() -> Iterator[list[str]]:
    """Have `${oc.env:NAME}` fail, however it is written; the list then contains the variable's name."""
    variables: list[str] = []

    def refuse(name: str, *default: object) -> None:
        variables.append(name)
        raise KeyError(name)

    OmegaConf.register_new_resolver("oc.env", refuse, replace=True)
    try:
        yield variables
    finally:
        OmegaConf.register_new_resolver("oc.env", omegaconf_resolvers.oc.env, replace=True)


def _describe_environment_use(option: str, *, variable: str) -> str:
    return (
        f"{option}: reads the environment variable {variable}, but every option is stored in the run folder, and shown "
        f'in its report and in trackers. If {variable} is no secret, let the shell write its value: "${variable}". '
        f'If it is one, read it in the family\'s code, where it is needed: os.environ["{variable}"]'
    )


def _take_first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")
