"""Lists the prints of a raw folder and says whose they are: by `index.csv`, or by the file names."""

from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from glob import escape
from itertools import groupby
from operator import attrgetter
from pathlib import Path

from trainyard.data.raw import IMAGES, count_by_suffix, list_folder
from trainyard.errors import UserError
from trainyard.foreign import note_read
from trainyard.text import align_columns, format_override, join_names

from .config import PackingSettings
from .index_csv import DPI_RANGE, INDEX_CSV, read_index_csv
from .layouts import BARE_FVC, FVC, FVC_DPI, NAMED, PUBLIC, SESSIONS, SETS, Layout, NotOneFinger, Reading
from .minutia_files import SUFFIXES as MINUTIA_SUFFIXES

SUFFIXES = IMAGES | {".wsq"}
README = "jobs/fingerprint/README.md"
EXAMPLES = 5
SINGLE_SHARE = 0.9  # of the fingers with one impression, above which the names are probably read in the wrong way


@dataclass(frozen=True, slots=True)
class Print:
    """One image and whose it is."""

    path: str  # below the raw folder, "/" between folders
    finger: str  # unique over the data set
    impression: int
    set: str
    dpi: int  # 0: neither the listing nor an option for its set says; the file or packing.dpi decides
    split: str  # "": split.* decide


@dataclass
class Listing:
    """The prints of a raw folder."""

    source: str  # of the fingers' names: index.csv or the layout
    prints: list[Print] = field(default_factory=list)  # in the order they are packed
    unreadable: dict[str, str] = field(default_factory=dict)  # path -> reason: names that the layout cannot read
    left_out: dict[str, list[str]] = field(default_factory=dict)  # why -> paths of images that are not packed


def list_prints(raw: Path, packing: PackingSettings) -> Listing:
    """Return the prints below a folder, sorted by set folder and name; reads no image.

    Raises:
        UserError: `index.csv` has wrong cells; the file names can be read in two ways that give other fingers or
            another resolution; no file is an image; two files are the same impression; or `packing.dpi_of_sets` does
            not fit.
    """
    images, other_files = _find_files(raw)
    if other_files and not images:
        raise UserError(f"{raw}: expected images ({' '.join(sorted(SUFFIXES))}), found {count_by_suffix(other_files)}.")
    if (raw / INDEX_CSV).is_file():
        listing = _list_by_index(raw, images, packing)
    elif packing.layout == "auto":
        listing = _list_by_name(images, _choose_layout(raw, images, packing))
    else:
        listing = _list_by_name(images, _place(NAMED[packing.layout], raw))
    for path in other_files if packing.minutiae == "files" else ():
        if _read_suffix(path) in MINUTIA_SUFFIXES:
            note_read(raw / path)
    _check_unique_impressions(raw, listing.prints)
    dpi_of_sets = _match_dpi(packing.dpi_of_sets, sorted({file.set for file in listing.prints}))
    explicit = listing.source == INDEX_CSV  # a cell is closer to the print than an option for its set
    listing.prints = [
        replace(
            file, dpi=(file.dpi or dpi_of_sets.get(file.set, 0)) if explicit else dpi_of_sets.get(file.set, file.dpi)
        )
        for file in listing.prints
    ]
    return listing


def describe_listing(listing: Listing, packing: PackingSettings) -> list[str]:
    """Return the lines that tell a person how the folder is read: a summary and five examples."""
    prints = listing.prints
    fingers, sets = {file.finger for file in prints}, {file.set for file in prints}
    header = ["path", "finger", "impression", "set", "dpi", "split"]
    rows = [
        [file.path, file.finger, str(file.impression), file.set or "-", _name_dpi(file, packing), file.split or "-"]
        for file in _pick_examples(prints)
    ]
    return [
        f"prints {len(prints)}, fingers {len(fingers)}, sets {len(sets)}; read by {listing.source}. For example:",
        *align_columns([header, *rows], indent="  "),
    ]


def find_doubts(listing: Listing) -> list[str]:
    """Return a sentence for each reason to doubt that the folder is read as its owner means."""
    doubts = [
        f"{len(paths)} images are left out, {why}: {join_names(paths, most=3)}"
        for why, paths in sorted(listing.left_out.items())
    ]
    count = Counter(file.finger for file in listing.prints)
    singles = sum(number == 1 for number in count.values())
    if len(count) > 1 and singles >= SINGLE_SHARE * len(count):
        doubts.append(
            f"{singles} of {len(count)} fingers have a single impression, so there is next to nothing to learn from or "
            "to score. If that is not so, the names are read in the wrong way: choose another packing.layout, or "
            f"write an {INDEX_CSV} ({README})."
        )
    return doubts


def _find_files(raw: Path) -> tuple[list[str], list[str]]:
    """Return the paths of images, and of other files, below a folder; hidden ones do not count.

    A folder's own files come before those of its sub-folders, each sorted by name.

    Raises:
        UserError: a folder cannot be listed, or links to one that was listed already, so its prints would be there
            twice.
    """
    images: list[str] = []
    other: list[str] = []
    seen: dict[Path, str] = {}
    waiting = [""]
    while waiting:
        prefix = waiting.pop()
        first = seen.setdefault((raw / prefix).resolve(), prefix)
        if first != prefix:
            raise UserError(
                f"{raw / prefix}: links to {raw / first}, so its prints would count twice. Remove the link."
            )
        folders = []
        for entry in list_folder(raw / prefix):
            path = prefix + entry.name
            if entry.is_folder:
                folders.append(f"{path}/")
            else:
                (images if _read_suffix(path) in SUFFIXES and entry.is_file else other).append(path)
        waiting += reversed(folders)
    return images, other


def _read_suffix(path: str) -> str:
    stem, dot, suffix = path.rpartition("/")[2].rpartition(".")
    return f".{suffix.lower()}" if stem and dot else ""


def _list_by_index(raw: Path, images: Sequence[str], packing: PackingSettings) -> Listing:
    if packing.layout != "auto":
        raise UserError(
            f"{raw / INDEX_CSV} and packing.layout={packing.layout} both say whose prints these are. "
            f"Remove {INDEX_CSV}, or set packing.layout=auto."
        )
    rows = read_index_csv(raw / INDEX_CSV, images=set(images))
    listing = Listing(INDEX_CSV)
    numbered: Counter[tuple[str, str]] = Counter()
    for row in sorted(rows, key=attrgetter("path")):
        numbered[row.set, row.finger] += 1
        impression = numbered[row.set, row.finger] if row.impression is None else row.impression
        listing.prints.append(Print(row.path, row.finger, impression, row.set, row.dpi, row.split))
    if missing := sorted(set(images) - {row.path for row in rows}):
        listing.left_out[f"because {INDEX_CSV} does not name them"] = missing
    return listing


def _list_by_name(images: Sequence[str], layout: Layout) -> Listing:
    listing = Listing(f"packing.layout={layout.name}")
    for path in images:
        try:
            reading = layout.read(_cut_suffix(path))
        except NotOneFinger:
            listing.left_out.setdefault("because they show several fingers or a palm", []).append(path)
            continue
        if reading is None:
            deep = layout in (SETS, SESSIONS) and path.count("/") > 1
            what = "the file is more than one folder deep" if deep else f"the name is not {layout.expected}"
            listing.unreadable[path] = f"{what}. Choose another packing.layout, or write an {INDEX_CSV}: {README}"
        else:
            listing.prints.append(Print(path, reading.finger, reading.impression, reading.set, reading.dpi, ""))
    return listing


def _cut_suffix(image: str) -> str:
    # ten times as fast as pathlib, and called a dozen times for each of a million files
    return image.rpartition(".")[0]


def _choose_layout(raw: Path, images: Sequence[str], packing: PackingSettings) -> Layout:
    """Return the layout of a folder whose names can be read in one way only.

    Raises:
        UserError: a public data set's reading gives other fingers, or another resolution, than the plain one; or
            two sub-folders have a finger of the same name.
    """
    plain = {path: SETS.read(_cut_suffix(path)) for path in images}
    stated = {
        reading.set
        for reading in plain.values()
        if reading and any(fnmatchcase(reading.set, option.rpartition(":")[0]) for option in packing.dpi_of_sets)
    }
    dpi = {path: 0 if reading is None or reading.set in stated else packing.dpi for path, reading in plain.items()}
    public = [_place(layout, raw) for layout in PUBLIC]
    fitting = [(layout, readings) for layout in public if (readings := _read_fitting(images, layout))]
    if fitting and fitting[0][0].name == FVC.name and len(fitting[0][1]) == len(images) and not any(plain.values()):
        return fitting[0][0]  # FVC's folders in others: nothing else has such names
    choices = [choice for layout, readings in fitting if (choice := _compare_readings(layout, readings, plain, dpi))]
    if choices:
        raise UserError(
            f"{raw}: whose prints are these? {' '.join(choices)} If the plain reading is right, type "
            f"packing.layout=sets. If none is, write an {INDEX_CSV}: {README}."
        )
    _check_unique_names(raw, images)
    _ask_for_year(raw, images, stated)
    return SETS


def _place(layout: Layout, raw: Path) -> Layout:
    """Return a layout that also reads the names of the raw folder and of the one above, where FVC's may be."""
    if layout is not FVC:
        return layout
    above = "/".join(raw.absolute().parts[-2:])
    return replace(layout, above=f"{above}/")


def _ask_for_year(raw: Path, images: Iterable[str], stated: Set[str]) -> None:
    """Refuse a folder called as one of FVC's sensors, whose resolution depends on the year, which nothing says."""
    for path in images:
        folder = path.rpartition("/")[0] or raw.name
        match = BARE_FVC.fullmatch(folder.rpartition("/")[2])
        others = match and {dpi for (_, db), dpi in FVC_DPI.items() if db == match["db"]}
        if others and path.rpartition("/")[0] not in stated and not _place(FVC, raw).read(_cut_suffix(path)):
            option = format_override("packing.dpi_of_sets", [f"{escape(folder) if '/' in path else '*'}:500"])
            raise UserError(
                f"{raw}: {path} is in a folder called as a sensor of FVC, which has 500 dpi in some years and "
                f"{' or '.join(map(str, sorted(others)))} in others. Which is it? Type "
                f"{option}, or the other number, or packing.layout=sets for "
                "packing.dpi."
            )


def _read_fitting(images: Iterable[str], layout: Layout) -> dict[str, Reading | None]:
    """Return a layout's readings of the files that fit it, None for several fingers.

    Where other data sets may have such names, they count only if all names of a folder fit.
    """
    fitting: dict[str, Reading | None] = {}
    for _, paths in groupby(images, key=lambda path: path.rpartition("/")[0]):
        group: dict[str, Reading | None] = {}
        all_fit = True
        for path in paths:
            try:
                reading = layout.read(_cut_suffix(path))
            except NotOneFinger:
                group[path] = None
                continue
            if reading is None:
                all_fit = False
            else:
                group[path] = reading
        if all_fit or layout.distinctive:
            fitting |= group
    return fitting


def _compare_readings(
    layout: Layout, public: dict[str, Reading | None], plain: dict[str, Reading | None], dpi: dict[str, int]
) -> str:
    """Return a sentence on how a public layout's reading differs from the plain one; "" if it does not.

    Args:
        public, plain: the readings of the files; None where there is none.
        dpi: of the plain reading; 0 where an option states it, which is then right for both.
    """
    finger_of: dict[str, str] = {}  # plain finger -> public finger; the same fingers if this and its reverse are maps
    name_of: dict[str, str] = {}
    for path, reading in public.items():
        start = f"The names fit {layout.title} (packing.layout={layout.name}), where {path} is"
        as_plain = plain[path]
        if reading is None:
            return f"{start} an image of several fingers or a palm."
        start = f"{start} impression {reading.impression} of finger {reading.finger}"
        if as_plain is None:
            return f"{start}; it is no <finger>_<impression>."
        finger = finger_of.setdefault(as_plain.finger, reading.finger)
        name = name_of.setdefault(reading.finger, as_plain.finger)
        if finger != reading.finger or name != as_plain.finger:
            print_name = f"impression {as_plain.impression} of finger {as_plain.finger}"
            return f"{start}; as <finger>_<impression> it is {print_name}."
        if reading.dpi and dpi[path] not in (0, reading.dpi):
            option = format_override("packing.dpi_of_sets", [f"{escape(as_plain.set) or '*'}:{reading.dpi}"])
            return f"{start} at {reading.dpi} dpi, but packing.dpi={dpi[path]}. To state that alone, type {option}."
    return ""


def _check_unique_names(raw: Path, images: Iterable[str]) -> None:
    """Refuse two folders with a finger of the same name, unless they are FVC's, whose fingers are known to differ."""
    owners: dict[str, tuple[str, str]] = {}  # finger -> folder and path
    for path in images:
        reading = SESSIONS.read(_cut_suffix(path))
        if reading is None or _place(FVC, raw).read(_cut_suffix(path)):
            continue
        folder, earlier = owners.setdefault(reading.finger, (reading.set, path))
        if folder != reading.set:
            raise UserError(
                f"{raw}: {earlier} and {path} have a finger of the same name. Is it one finger? Then type "
                f"packing.layout=sessions. Are these two fingers? Then type packing.layout=sets. If some folders share "
                f"their fingers and others do not, write an {INDEX_CSV}: {README}."
            )


def _check_unique_impressions(raw: Path, prints: Iterable[Print]) -> None:
    seen: dict[tuple[str, str, int], str] = {}
    for file in prints:
        earlier = seen.setdefault((file.set, file.finger, file.impression), file.path)
        if earlier != file.path:
            raise UserError(
                f"{raw}: {earlier} and {file.path} are both impression {file.impression} of finger {file.finger}"
                f"{f' in set {file.set}' if file.set else ''}: the same print twice makes scores too good. Remove one, "
                f"or tell them apart in an {INDEX_CSV}: {README}."
            )


def find_set_dpi(options: Sequence[str], name: str) -> int:
    """Return the resolution that `packing.dpi_of_sets` states for a set; 0 if it names only others."""
    return _match_dpi([pair for pair in options if fnmatchcase(name, pair.rpartition(":")[0])], [name]).get(name, 0)


def _match_dpi(options: Sequence[str], sets: Sequence[str]) -> dict[str, int]:
    """Return the resolution of each set that `packing.dpi_of_sets` names."""
    dpi_by_set: dict[str, int] = {}
    for option in options:
        pattern, colon, text = option.rpartition(":")
        low, high = DPI_RANGE
        if not colon or not (text.isascii() and text.isdecimal() and low <= int(text) <= high):
            raise UserError(
                f"packing.dpi_of_sets: expected SET:DPI with {low} to {high} dpi, such as [FVC2002_DB2_B:569], found "
                f"'{option}'."
            )
        matched = [name for name in sets if fnmatchcase(name, pattern)]
        if not matched:
            raise UserError(
                f"packing.dpi_of_sets: '{pattern}' matches no set. Sets found: "
                f"{join_names([name or '(none: images directly in the raw folder)' for name in sets])}."
            )
        for name in matched:
            if dpi_by_set.setdefault(name, int(text)) != int(text):
                raise UserError(f"packing.dpi_of_sets: set '{name}' has {dpi_by_set[name]} and {text} dpi. Keep one.")
    return dpi_by_set


def _pick_examples(prints: Sequence[Print]) -> list[Print]:
    """Return five prints in their order: the first of each set, and evenly spaced ones, the last among them."""
    firsts = {file.set: i for i, file in reversed(list(enumerate(prints)))}
    spaced = [i * (len(prints) - 1) // (EXAMPLES - 1) for i in range(EXAMPLES)]
    picked = list(dict.fromkeys([*sorted(firsts.values()), *reversed(spaced)]))[:EXAMPLES]
    return [prints[i] for i in sorted(picked)] if prints else []


def _name_dpi(file: Print, packing: PackingSettings) -> str:
    if file.dpi:
        return str(file.dpi)
    return f"of the file, or {packing.dpi}" if _read_suffix(file.path) == ".wsq" else str(packing.dpi)
