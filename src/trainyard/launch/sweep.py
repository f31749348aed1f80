"""Creates sweeps: many runs of one job from a line such as `optimizer.lr=1e-4,3e-4 seed=0,1,2`. No torch or h5py.

A sweep is a file, `<runs>/sweeps/<name>/sweep.json`, that names its runs. They are ordinary runs, created before
anything is submitted, so status, logs, why and resume work on each.
"""

import itertools
import math
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from trainyard.cluster import query as slurm
from trainyard.config.compose import compose_each
from trainyard.config.settings import TrainConfig
from trainyard.errors import UserError
from trainyard.files import DISK_THREADS, create_common_folder, restrict_umask, write_atomically
from trainyard.runs.create import Origin, write_run
from trainyard.runs.folder import check_name, find_free_name
from trainyard.runs.sweep_file import FILE, FOLDER, Element, Sweep, encode_sweep

if TYPE_CHECKING:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import Override

T = TypeVar("T")

MAX_ELEMENTS = 10_000
"""More are rather a mistake than intended."""


def expand(words: Sequence[str]) -> dict[str, list[str]]:
    """Return the values of each option that varies, as one types them, in the order typed.

    Values are written as for Hydra's own multirun: `seed=0,1,2`, `seed=range(0,3)`, `optimizer.name=choice(adamw,sgd)`.
    Text in quotes or brackets is one value.

    Args:
        words: each an option with its values, or several of these separated by spaces.

    Raises:
        UserError: a word is not an option with values, an option or a value appears twice, or there are more
            than `MAX_ELEMENTS` combinations.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parser = OverridesParser.create()
    axes: dict[str, list[str]] = {}
    for word in itertools.chain.from_iterable(_split_words(text) for text in words):
        name, values = _parse_axis(word, parser)
        if name in axes:
            raise UserError(f"{word}: '{name}' varies twice in this sweep. Write all its values after one equal sign.")
        axes[name] = values
    if not axes:
        raise UserError('A sweep needs an option with several values: --sweep "optimizer.lr=1e-4,3e-4 seed=0,1,2"')
    if math.prod(map(len, axes.values())) > MAX_ELEMENTS:
        raise UserError(f"{' '.join(words)}: more than {MAX_ELEMENTS} runs. Leave values out, or make several sweeps.")
    return axes


class Combination(NamedTuple):
    """One run of a sweep, before it has a folder."""

    overrides: tuple[str, ...]  # its own, one per axis
    config: TrainConfig


def combine(
    job: str, sweep_words: Sequence[str], overrides: Sequence[str], jobs_dir: Path
) -> tuple[dict[str, list[str]], list[Combination]]:
    """Return the values of each option that varies, and every combination of them. Writes nothing.

    Raises:
        UserError: the job does not accept a word or a combination, or two combinations are the same run.
    """
    axes = expand(sweep_words)
    _check_axes_vary(axes, overrides)
    own = [
        tuple(f"{option}={value}" for option, value in zip(axes, values, strict=True))
        for values in itertools.product(*axes.values())
    ]
    configs = show_progress(compose_each(job, overrides, own, jobs_dir), "reading", total=len(own))
    combinations = [Combination(*pair) for pair in zip(own, configs, strict=True)]
    _check_distinct(combinations)
    return axes, combinations


def show_progress(items: Iterable[T], doing: str, *, total: int) -> Iterator[T]:
    """Yield the items, one for each run, with a bar on a terminal."""
    from tqdm import tqdm

    yield from tqdm(items, total=total, unit="run", desc=doing, disable=None, leave=False)


def name_run(sweep: str, index: int) -> str:
    """Return the name of a sweep's run."""
    return f"{sweep}-{index:03d}"


def name_packing_run(folder: Path, job: str) -> Path:
    """Return the folder in which the Slurm job that packs the data of a sweep records; it is a run that only packs."""
    return find_free_name(folder / job / "packing")


class NewRun(NamedTuple):
    """One run of a sweep, as it will be created."""

    overrides: tuple[str, ...]  # its own, one per axis
    config: TrainConfig  # as planned
    chosen: Mapping[str, Mapping[str, Any]] = MappingProxyType({})  # as for `create_run`


def create(
    job: str,
    axes: dict[str, list[str]],
    fixed: Sequence[str],
    new: Sequence[NewRun],
    *,
    root: Path,
    name: str | None,
    environ: Mapping[str, str],
    request: Mapping[str, Any] = MappingProxyType({}),
    group: str = "",
) -> Sweep:
    """Create a sweep: the file that names its runs, and then these. After an error there is nothing of it.

    If it is killed meanwhile, `create_runs` goes on.

    Args:
        axes: as of `combine`.
        fixed: options that all runs share.
        root: folder of all runs.
        name: name of the sweep; None: job and time. Run names are this name followed by their index.
        environ: environment variables; a run records a few known ones.
        request: resources requested of Slurm for each run.
        group: as for `create_run`.

    Raises:
        UserError: the name is taken, by a sweep or a run.
    """
    check_name(name, of="sweep")
    create_common_folder(root, group=group)
    create_common_folder(root / FOLDER, group=group)
    with restrict_umask():
        folder = _claim_folder(root / FOLDER, name, default=f"{job}-{datetime.now():%Y%m%d-%H%M%S}")
        places = [root / job / name_run(folder.name, index) for index in range(len(new))]
        elements = [Element(i, run.overrides, place) for i, (run, place) in enumerate(zip(new, places, strict=True))]
        sweep = Sweep(folder, job, axes, tuple(fixed), elements, dict(request))
        try:
            if taken := next((place for place in places if place.exists()), None):
                raise UserError(f"{taken}: there is a run of this name. Choose another name for the sweep.")
            write_atomically(folder / FILE, encode_sweep(sweep, root))
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    try:
        create_runs(elements, new, environ=environ, group=group)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return sweep


def create_runs(
    elements: Sequence[Element], new: Sequence[NewRun], *, environ: Mapping[str, str], group: str = ""
) -> None:
    """Create the runs of some elements of a sweep; after an error there is none of them."""
    origin, folders = Origin.collect(environ), []
    create_common_folder(elements[0].run.parent, group=group)

    def create(element: Element, run: NewRun) -> None:
        root, name = element.run.parents[1], element.run.name
        folders.append(write_run(root, run.config, name=name, origin=origin, chosen=run.chosen, group=group))

    pool = ThreadPoolExecutor(DISK_THREADS)
    try:
        with restrict_umask():
            for _ in show_progress(pool.map(create, elements, new), "creating", total=len(new)):
                pass
    except BaseException:
        pool.shutdown(cancel_futures=True)
        for created in folders:
            shutil.rmtree(created, ignore_errors=True)
        raise
    pool.shutdown()


def choose_array_size(count: int, *, packs: bool = False, user: str, account: str, qos: str) -> int:
    """Return how many of the sweep's `count` runs Slurm takes in one array.

    Args:
        packs: whether a job that packs their data comes before them.

    Raises:
        UserError: Slurm takes no arrays, or not that many jobs of this user.
    """
    settings = slurm.query_settings()
    most = int(settings["MaxArraySize"]) - 1  # Slurm's largest index
    if most < 1:
        raise UserError("This Slurm takes no arrays (MaxArraySize=0), so no sweeps. Submit runs: trainyard submit JOB")
    if any(word in settings["AccountingStorageEnforce"] for word in ("limits", "safe")):
        limits = slurm.query_rules(user).find_limits(account=account, qos=qos)
        for limit in (limit for limit in limits if limit.name.startswith("MaxSubmit")):
            queued = slurm.count_queued(user, limit)
            if queued + packs + count > limit.most:
                requested = f"{count} runs and the job that packs their data" if packs else f"{count} runs"
                raise UserError(
                    f"{requested} requested, but {limit.of} allows {limit.most} of your jobs in the queue "
                    f"({limit.name}), and {queued} are there. Sweep over at most "
                    f"{max(0, limit.most - queued - packs)} now."
                )
    return most


def discard(sweep: Sweep) -> None:
    """Delete a sweep that was never submitted, with its runs."""
    for element in sweep.elements:
        shutil.rmtree(element.run)
    shutil.rmtree(sweep.folder)


# The values of a sweep


def _split_words(text: str) -> Iterator[str]:
    """Yield the words of a line. Spaces inside quotes, brackets and braces do not separate words."""
    word, quote, depth, escaped = "", "", 0, False
    for character in text:
        if character.isspace() and not quote and not depth and not escaped:
            if word:
                yield word
            word = ""
            continue
        word += character
        if escaped or character == "\\":
            escaped = not escaped
        elif quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        else:
            depth += (character in "([{") - (character in ")]}")
    if word:
        yield word


def _parse_axis(word: str, parser: "OverridesParser") -> tuple[str, list[str]]:
    from hydra.errors import HydraException

    name, equals, _ = word.partition("=")
    if not equals or not re.fullmatch(r"[\w.]+", name):
        raise UserError(
            f"'{word}' is not an option with values. Write option=value,value, such as optimizer.lr=1e-4,3e-4, "
            "without spaces around the equal sign and without a prefix."
        )
    try:
        override = parser.parse_override(word)
        values = list(itertools.islice(_list_values(word, override), MAX_ELEMENTS + 1))
    except UserError:
        raise
    except (HydraException, ValueError):  # ValueError: a range with step 0
        raise UserError(
            f"{word}: cannot be read as values of {name}. Separate values with commas, or write range(first,end,step) "
            "or choice(a,b), and put a value with special characters in quotes."
        ) from None
    if not values:
        raise UserError(f"{word}: has no value. A range does not include its end: range(0,3) is 0,1,2.")
    duplicates = [value for value in dict.fromkeys(values) if values.count(value) > 1]
    if duplicates:
        raise UserError(f"{word}: {duplicates[0]} appears twice. Identical runs add no information: vary seed instead.")
    return name, values


def _list_values(word: str, override: "Override") -> Iterator[str]:
    from hydra.core.override_parser.types import ValueType

    if override.value_type in (ValueType.GLOB_CHOICE_SWEEP, ValueType.INTERVAL_SWEEP):
        kind = "glob" if override.value_type == ValueType.GLOB_CHOICE_SWEEP else "interval"
        raise UserError(f"{word}: {kind}() does not list its values. Write them: {override.key_or_group}=a,b")
    if not override.is_sweep_override():
        yield override.get_value_string()
        return
    for value in override.sweep_iterator():
        yield _format_value(value)


def _format_value(value: Any) -> str:
    """Write a value so that Hydra can parse it, and a free-text option takes it verbatim."""
    from hydra.core.override_parser.types import Quote, QuotedString, Transformer

    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str) and not re.fullmatch(r"[\w./+-]*", value):
        return QuotedString(value, Quote.single).with_quotes()
    return Transformer.str(value)


def _check_axes_vary(axes: Mapping[str, Sequence[str]], overrides: Sequence[str]) -> None:
    for override in overrides:
        name = override.partition("=")[0]
        if name in axes:
            raise UserError(
                f"{override}: '{name}' also varies in this sweep ({', '.join(axes[name])}). Keep only one of the two."
            )


def _check_distinct(combinations: Sequence[Combination]) -> None:
    """Refuse values that differ only as text, such as 1 and 1.0."""
    first_with: dict[str, tuple[str, ...]] = {}
    for own, config in combinations:
        first = first_with.setdefault(repr(config), own)
        if first is not own:
            raise UserError(f"'{' '.join(first)}' and '{' '.join(own)}' are the same run. Leave one of them out.")


# The file


def _claim_folder(sweeps: Path, name: str | None, *, default: str) -> Path:
    """Create the folder of a new sweep, atomically: two sweeps never get the same one."""
    for number in itertools.count(1):
        folder = sweeps / (name or (default if number == 1 else f"{default}-{number}"))
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            if name is not None:
                raise UserError(_describe_taken(folder)) from None
    raise AssertionError("unreachable")


def _describe_taken(folder: Path) -> str:
    if (folder / FILE).is_file():
        command = f"trainyard sweep --continue {folder.name}"
        return f"{folder}: a sweep of this name exists. Choose another name, or continue it: {command}"
    return f"{folder}: creating a sweep of this name was interrupted. Choose another name, or remove the folder."
