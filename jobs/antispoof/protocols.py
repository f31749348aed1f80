"""Reads protocols and raw folders: file, label, attack, speaker and set of each utterance.

`read_trials` reads a protocol file; `find_utterances` reads a raw folder with one or several databases.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trainyard.data.raw import SOUNDS, find_listed, list_files, list_folder
from trainyard.errors import UserError
from trainyard.foreign import read_lines, read_rows
from trainyard.text import compose_letters, format_override

from .config import PackingSettings
from .metrics import AsvRates

BONAFIDE, SPOOF = "bonafide", "spoof"
WORDS = {
    "bonafide": True, "bona-fide": True, "bona_fide": True, "genuine": True, "real": True, "human": True,
    "spoof": False, "spoofed": False, "fake": False,
}  # fmt: skip
ASKED = "none"  # packing.bonafide_label: labels are words
TRAIN, VAL, TEST = "train", "val", "test"


@dataclass(frozen=True)
class Trial:
    """One line of a protocol."""

    utterance: str
    bonafide: bool | None  # None: the protocol lists names only
    attack: str = "-"
    speaker: str = ""
    phase: str = ""  # 2021 only: progress, eval or hidden
    path: str = ""  # CSV only
    set: str = ""  # CSV only


@dataclass(frozen=True)
class Utterance:
    """One recording of a raw folder."""

    key: str  # unique: the file's path relative to the raw folder
    path: Path | None  # None: listed, but missing
    bonafide: bool
    attack: str  # "-": bona fide
    speaker: str  # "": unknown
    set: str  # train, val, test or test_...; "": not assigned yet
    fold: int = 0  # of a training utterance, from 1; 0: none


def find_utterances(raw: Path, split: PackingSettings) -> list[Utterance]:
    """Return every utterance of the databases in a raw folder or its sub-folders, in a fixed order.

    Known layouts: ASVspoof 2019 LA and PA, 2021 LA and DF, ASVspoof 5, `protocol.csv`, In-the-Wild (`meta.csv`), ADD
    (`label.txt` or `label/train_label.txt` with names and labels), WaveFake (`ljspeech_melgan/`, ...), Fake-or-Real
    (`{training,validation,testing}/{real,fake}`) and `{bonafide,spoof}/`, or `{real,fake}/`, without sets.

    Raises:
        UserError: a protocol has a wrong line, or nothing is left to train on.
    """
    return assign_sets(list_utterances(raw, split.bonafide_label), split)


def list_utterances(raw: Path, bonafide_label: str = ASKED) -> list[Utterance]:
    """Return every utterance as `find_utterances`, but without a set where no protocol assigns one.

    Args:
        bonafide_label: as `packing.bonafide_label`.

    Raises:
        UserError: a protocol has a wrong line.
    """
    found: dict[str, Utterance] = {}
    for base in (raw, *sorted(path for path in raw.iterdir() if path.is_dir())):
        for read in READERS:
            for utterance in read(raw, base, bonafide_label):
                found.setdefault(utterance.key, utterance)  # `training/real` also matches as an own folder `real`
    return list(found.values())


def read_trials(path: Path) -> list[Trial]:
    """Read a protocol; the first line tells its format, which every other line must have too.

    Formats: the 5 fields of ASVspoof 2019, the 8 or more of 2021, those of ASVspoof 5 (utterance second, the key in
    any place), `filename cm-label` with that header, CSV with a header, and a list of names.

    Raises:
        UserError: the file is missing, the format is unknown, or a line has another format.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such protocol file.")
    if path.suffix == ".csv":
        return read_csv_trials(path, None)
    lines = [(number, line.split()) for number, line in read_lines(path)]
    if not lines:
        raise UserError(f"{path}: the protocol is empty.")
    header = lines[0][1][0].lower() == "filename"
    if header or _is_header(*(words for _, words in lines[:2])):
        lines = lines[1:]
    parse, fields = _detect_format(path, lines[0][1] if lines else [], header)
    listed: list[Trial] = []
    for number, words in lines:
        if len(words) != fields:
            raise UserError(
                f"{path}, line {number}: expected {fields} fields, as in the first line, found {len(words)}: "
                f"'{' '.join(words)}'. Fix or remove the line."
            )
        try:
            listed.append(parse(words))
        except ValueError as error:
            raise UserError(f"{path}, line {number}: {error} in '{' '.join(words)}'. Fix or remove the line.") from None
    _check_unique(path, [trial.utterance for trial in listed])
    return listed


def read_asv_rates(path: Path) -> AsvRates:
    """Read an ASV score file, `source target|nontarget|spoof score` per line, and return the system's error rates.

    Raises:
        UserError: the file is missing, a line has another format, or a kind of trial is missing.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such ASV score file.")
    groups: dict[str, list[float]] = {"target": [], "nontarget": [], "spoof": []}
    for number, line in read_lines(path):
        try:
            _, kind, score = line.split()
            groups[kind].append(float(score))
        except (ValueError, KeyError):
            raise UserError(
                f"{path}, line {number}: expected 'source target|nontarget|spoof score', found '{line.strip()}'."
            ) from None
    try:
        return AsvRates.from_scores(groups["target"], groups["nontarget"], groups["spoof"])
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def find_asv_files(raw: Path) -> dict[str, Path]:
    """Return the ASV score files of ASVspoof 2019 in a raw folder, by set.

    The validation set has its own file: the scores of the evaluation set would make its t-DCF wrong.
    """
    found: dict[str, Path] = {}
    for base in (raw, *sorted(path for path in raw.iterdir() if path.is_dir())):
        for track, name, part in (
            *(("LA", VAL, "dev"), ("LA", "test_2019", "eval")),
            *(("PA", VAL, "dev"), ("PA", "test_2019_pa", "eval")),
        ):
            path = base / f"ASVspoof2019_{track}_asv_scores" / f"ASVspoof2019.{track}.asv.{part}.gi.trl.scores.txt"
            if path.is_file() and found.setdefault(name, path) != path:
                raise UserError(f"{raw}: {path} and {found[name]} are of two tracks. Pack one track at a time.")
    return found


def find_audio_files(folder: Path) -> list[Path]:
    """Return the audio files in a folder and below it, sorted; skips hidden ones."""
    return list_files(folder, SOUNDS)


def assign_sets(found: list[Utterance], split: PackingSettings) -> list[Utterance]:
    """Assign utterances without a set to one, by speaker or else by file name, so that copies stay together."""
    result = []
    for utterance in found:
        if not utterance.set:
            position = hash_to_fraction(utterance.speaker or _name_original(utterance), split.seed)
            is_val = position < split.test_share + split.val_share
            name = TEST if position < split.test_share else VAL if is_val else TRAIN
            utterance = replace(utterance, set=name)
        result.append(utterance)
    names = sorted({utterance.set for utterance in result})
    if names and TRAIN not in names:
        raise UserError(
            f"No utterance is left to train on: the raw folder contains only {', '.join(names)}. "
            "To score recordings with a trained model: trainyard predict RUN FOLDER OUT.csv"
        )
    return result


def assign_folds(found: Sequence[Utterance], *, count: int) -> list[Utterance]:
    """Assign training utterances to folds by speaker or, if a class has fewer than two of them, by file name.

    Groups of the same classes go to the folds in turn: a class in two groups is in two folds.
    """
    training = [utterance for utterance in found if utterance.set == TRAIN]
    speakers = {
        label: {utterance.speaker for utterance in training if utterance.bonafide == label} for label in (True, False)
    }
    by_speaker = all(len(names) > 1 and "" not in names for names in speakers.values() if names)
    groups: dict[str, list[bool]] = {}

    def name_group(utterance: Utterance) -> str:
        return utterance.speaker if by_speaker else _name_original(utterance)

    for utterance in training:
        groups.setdefault(name_group(utterance), []).append(utterance.bonafide)
    order = sorted(groups, key=lambda name: (sum(groups[name]) / len(groups[name]), name))
    fold = {name: 1 + place % count for place, name in enumerate(order)}
    return [
        replace(utterance, fold=fold[name_group(utterance)]) if utterance.set == TRAIN else utterance
        for utterance in found
    ]


def _name_original(utterance: Utterance) -> str:
    return Path(utterance.key).stem.removesuffix("_gen")  # of a copy in WaveFake, which stays with its original


def hash_to_fraction(text: str, seed: int) -> float:
    """Hash a text to a number in [0, 1): assignments based on it do not change as data grow."""
    digest = hashlib.blake2b(f"{seed}:{text}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) / 2**64


# Lines


def _detect_format(path: Path, words: list[str], header: bool) -> tuple[Callable[[list[str]], Trial], int]:
    if header and len(words) == 2:
        return (lambda line: Trial(line[0], _parse_key(line[1]))), 2
    if len(words) == 1:
        return (lambda line: Trial(line[0], None)), 1
    if len(words) == 5 and words[4] in (BONAFIDE, SPOOF):
        return (lambda line: Trial(line[1], _parse_key(line[4]), line[3], line[0])), 5
    if len(words) >= 8 and words[5] in (BONAFIDE, SPOOF):
        return (lambda line: Trial(line[1], _parse_key(line[5]), line[4], line[0], phase=line[7])), len(words)
    if len(words) >= 6 and {BONAFIDE, SPOOF} & set(words):
        return _parse_asvspoof5, len(words)
    raise UserError(
        f"{path}, line 1: found {len(words)} fields: '{' '.join(words)}'. Expected 5 (ASVspoof 2019: speaker utterance "
        "- attack bonafide|spoof), 8 or more (2021: the key is the sixth), 6 or more with a key among them (ASVspoof "
        "5), a header 'filename cm-label', one name per line, or a .csv file."
    )


def _parse_asvspoof5(words: list[str]) -> Trial:
    """Parse a line whose second field is the utterance; the key is the last one found, after the attack."""
    at = max((i for i, word in enumerate(words) if word in (BONAFIDE, SPOOF)), default=-1)
    if at < 3:
        raise ValueError("no bonafide or spoof in the fourth or a later field")
    bonafide = words[at] == BONAFIDE
    return Trial(words[1], bonafide, "-" if bonafide else words[at - 1], words[0])


def _parse_key(word: str) -> bool:
    if word not in (BONAFIDE, SPOOF):
        raise ValueError(f"expected bonafide or spoof, found '{word}'")
    return word == BONAFIDE


def read_csv_trials(path: Path, bonafide_label: str | None, *, name_column: str = "path") -> list[Trial]:
    """Read a table with a header: the column of names and `label`, optionally `attack`, `speaker` and `set`.

    Args:
        bonafide_label: as `packing.bonafide_label`; None: labels are words, and no option changes that.

    Raises:
        UserError: the table is wrong, or a label is no word for bona fide or spoofed speech.
    """
    listed: list[Trial] = []
    for number, row in read_rows(
        path, columns=(name_column, "label"), further=("attack", "speaker", "set"), lower=True
    ):
        cell = {name: value.strip() for name, value in row.items()}
        if any(cell.values()):
            listed.append(_parse_row(f"{path}, line {number}", cell, cell[name_column], bonafide_label))
    _check_unique(path, [trial.path for trial in listed])
    return listed


def _parse_row(where: str, cell: Mapping[str, str], name: str, bonafide_label: str | None) -> Trial:
    if not name:
        raise UserError(f"{where}: names no file.")
    set_name = cell.get("set", "")
    if set_name and not re.fullmatch(rf"{TRAIN}|{VAL}|{TEST}(_\w+)?", set_name):
        raise UserError(f"{where}: set '{set_name}': expected {TRAIN}, {VAL}, {TEST} or {TEST}_NAME, or nothing.")
    bonafide = _parse_label(where, cell["label"], bonafide_label)
    attack = "-" if bonafide else cell.get("attack") or SPOOF
    path = Path(name)
    return Trial(path.stem, bonafide, attack, cell.get("speaker", ""), path=path.as_posix(), set=set_name)


def _parse_label(where: str, label: str, bonafide_label: str | None) -> bool:
    """Return whether a label means bona fide speech; a code means it in one half of the public tables, not in all."""
    if bonafide_label not in (ASKED, None):
        return label == bonafide_label
    if label.lower() not in WORDS and bonafide_label is None:
        raise UserError(f"{where}: label '{label}': expected one of {', '.join(WORDS)}. Write one of these words.")
    if label.lower() not in WORDS:
        raise UserError(
            f"{where}: label '{label}': expected one of {', '.join(WORDS)}. If the labels are codes, say which one "
            f"means bona fide: {format_override('packing.bonafide_label', label)}, if this one does"
        )
    return WORDS[label.lower()]


def _is_header(first: list[str], second: Sequence[str] = ()) -> bool:
    """Return whether the first line of a protocol names columns: only the second has a key, in as many fields."""
    keys = {BONAFIDE, SPOOF}
    return len(first) == len(second) >= 5 and not keys & set(first) and bool(keys & set(second))


def _check_unique(path: Path, names: Sequence[str]) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise UserError(f"{path}: '{name}' is listed twice. Remove one of its lines.")


# Raw folders


def _find_asvspoof_2019(raw: Path, base: Path, bonafide_label: str) -> Iterator[Utterance]:
    for track, test in (("LA", "test_2019"), ("PA", "test_2019_pa")):
        protocols = base / f"ASVspoof2019_{track}_cm_protocols"
        for part, suffix, set_name in (("train", "trn", TRAIN), ("dev", "trl", VAL), ("eval", "trl", test)):
            path = protocols / f"ASVspoof2019.{track}.cm.{part}.{suffix}.txt"
            if path.is_file():
                audio = base / f"ASVspoof2019_{track}_{part}" / "flac"
                yield from _match_trials(raw, read_trials(path), audio, set_name)


def _find_asvspoof_2021(raw: Path, base: Path, bonafide_label: str) -> Iterator[Utterance]:
    for track in ("LA", "DF"):
        audio = base / f"ASVspoof2021_{track}_eval" / "flac"
        if not audio.is_dir():
            continue
        places = [base / "keys" / track / "CM", base / "keys" / "CM", audio.parent, base]
        metadata = next((p / "trial_metadata.txt" for p in places if (p / "trial_metadata.txt").is_file()), None)
        if metadata is None:
            raise UserError(
                f"{audio.parent}: its keys are missing. Expected {places[0] / 'trial_metadata.txt'}. To score "
                "recordings without keys: trainyard predict RUN FOLDER OUT.csv"
            )
        yield from _match_trials(raw, read_trials(metadata), audio, f"test_2021_{track.lower()}")


def _find_asvspoof5(raw: Path, base: Path, bonafide_label: str) -> Iterator[Utterance]:
    for part, folders, set_name in (
        ("train", ("flac_T",), TRAIN),
        ("dev.track_1", ("flac_D",), VAL),
        ("eval.track_1", ("flac_E_eval", "flac_E"), "test_asv5"),
    ):
        for place in (base, base / "ASVspoof5_protocols"):
            path = next(
                (p for p in (place / f"ASVspoof5.{part}{end}" for end in (".tsv", ".txt")) if p.is_file()), None
            )
            if path is not None:
                audio = next((base / name for name in folders if (base / name).is_dir()), base / folders[0])
                yield from _match_trials(raw, read_trials(path), audio, set_name)
                break


def _find_table(raw: Path, base: Path, bonafide_label: str) -> Iterator[Utterance]:
    """Read `protocol.csv`, or the `meta.csv` of In-the-Wild."""
    seen: dict[str, str] = {}
    for name, name_column in (("protocol.csv", "path"), ("meta.csv", "file")):
        path = base / name
        if not _is_table(path, name_column):
            continue
        for trial in read_csv_trials(path, bonafide_label, name_column=name_column):
            assert trial.bonafide is not None
            file = find_listed(raw, trial.path, where=str(path), folders=(base,))
            key = trial.path if file is None else _make_key(raw, file)
            if other := seen.get(key):
                raise UserError(f"{path}: '{other}' and '{trial.path}' are one file. Remove one of the lines.")
            seen[key] = trial.path
            yield Utterance(key, file, trial.bonafide, trial.attack, trial.speaker, trial.set)


def _is_table(path: Path, name_column: str) -> bool:
    """Return whether a table is there: `protocol.csv` must be one, another `meta.csv` may have other columns."""
    if name_column == "path" or not path.is_file():
        return path.is_file()
    with path.open("rb") as file:
        names = re.split(rb"[,;\t|]", file.readline().removeprefix(b"\xef\xbb\xbf").strip().lower())
    return {name_column.encode(), b"label"} <= set(names)


def _find_label_lists(raw: Path, base: Path, bonafide_label: str) -> Iterator[Utterance]:
    """Read ADD's lists, `label.txt` or `label/train_label.txt`: a file name and a label on each line."""
    lists = [path for place in (base, base / "label") for path in list_files(place, {".txt"}, depth=0)]
    lists = [path for path in lists if "label" in path.stem.lower()]
    rows = {path: [(number, line.split()) for number, line in read_lines(path)] for path in lists}
    rows = {path: own for path, own in rows.items() if own and all(len(words) == 2 for _, words in own)}
    if not rows:
        return
    files: dict[str, list[Path]] = {}
    for found in find_audio_files(base):
        files.setdefault(found.name, []).append(found)
    for path, own in rows.items():
        if not any(name in files for _, (name, _) in own):
            continue  # a list of something else, or its recordings are next to it, in the folder above
        part = next((part for word, part in _PARTS.items() if word in path.stem.lower()), "")
        _check_unique(path, [words[0] for _, words in own])
        for number, (name, label) in own:
            bonafide = _parse_label(f"{path}, line {number}", label, bonafide_label)
            places = files.get(name, [])
            if len(places) > 1:
                raise UserError(f"{path}, line {number}: {places[0]} and {places[1]} have this name. Rename one.")
            key = _make_key(raw, places[0]) if places else name
            yield Utterance(key, places[0] if places else None, bonafide, "-" if bonafide else SPOOF, "", part)


_PARTS = {"train": TRAIN, "dev": VAL, "val": VAL, "eval": TEST, "test": TEST}


def _find_wavefake(raw: Path, base: Path, bonafide_label: str) -> Iterator[Utterance]:
    """Read WaveFake: a folder for each vocoder of LJSpeech, JSUT or Common Voice, and the recordings they copy."""
    for folder in sorted(path for path in base.iterdir() if path.is_dir()):
        name = folder.name.lower()
        bonafide = bool(re.fullmatch(r"ljspeech-1\.1|jsut_ver1\.1|(ljspeech|jsut)_real", name))
        if bonafide or name.startswith(("ljspeech_", "jsut_", "common_voices_")):
            for path in find_audio_files(folder):
                yield Utterance(_make_key(raw, path), path, bonafide, "-" if bonafide else folder.name, "", "")


def _find_fake_or_real(raw: Path, base: Path, bonafide_label: str) -> Iterator[Utterance]:
    for part, set_name in (("training", TRAIN), ("validation", VAL), ("testing", TEST)):
        for name, attack in (("real", "-"), ("fake", "fake")):
            for path in find_audio_files(base / part / name):
                yield Utterance(_make_key(raw, path), path, name == "real", attack, "", set_name)


def _find_own_folder(raw: Path, base: Path, bonafide_label: str) -> Iterator[Utterance]:
    """Read `bonafide/[<speaker>/]` and `spoof/[<attack>/[<speaker>/]]`, or any other of `WORDS`."""
    if _is_table(base / "protocol.csv", "path") or _is_table(base / "meta.csv", "file"):
        return
    for folder in sorted(path for path in base.iterdir() if path.is_dir() and not path.name.isdecimal()):
        bonafide = WORDS.get(folder.name.lower())
        for path in [] if bonafide is None else find_audio_files(folder):
            *inner, _ = path.relative_to(folder).parts
            attack = "-" if bonafide else inner.pop(0) if inner else SPOOF
            yield Utterance(_make_key(raw, path), path, bool(bonafide), attack, inner[0] if inner else "", "")


READERS: tuple[Callable[[Path, Path, str], Iterator[Utterance]], ...] = (
    _find_asvspoof_2019,
    _find_asvspoof_2021,
    _find_asvspoof5,
    _find_table,
    _find_label_lists,
    _find_wavefake,
    _find_fake_or_real,
    _find_own_folder,
)


def _match_trials(raw: Path, listed: Sequence[Trial], folder: Path, set_name: str) -> Iterator[Utterance]:
    """Yield the utterances that a protocol lists, each phase of 2021 as its own set; lists the folder only once."""
    entries = list_folder(folder) if folder.is_dir() else ()
    sounds = [Path(entry.name) for entry in entries if Path(entry.name).suffix.lower() in SOUNDS]
    present = {compose_letters(sound.stem): sound.name for sound in sounds}
    for trial in listed:
        if trial.bonafide is None:
            raise UserError(f"{folder}: the protocol lists names only, but training needs the keys.")
        name = present.get(compose_letters(trial.utterance))
        key = _make_key(raw, folder / (name or f"{trial.utterance}.flac"))
        trial_set = f"{set_name}_{trial.phase}" if trial.phase else set_name
        yield Utterance(key, folder / name if name else None, trial.bonafide, trial.attack, trial.speaker, trial_set)


def _make_key(raw: Path, path: Path) -> str:
    return path.relative_to(raw).as_posix()
