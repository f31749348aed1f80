"""Reads protocols and raw folders: file, label, attack, speaker and set of each utterance.

`read_trials` reads a protocol file; `find_utterances` reads a raw folder with one or several databases.
"""

import csv
import hashlib
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trainyard.data.raw import list_files
from trainyard.errors import UserError

from .config import PackingSettings
from .metrics import AsvRates

BONAFIDE, SPOOF = "bonafide", "spoof"
WORDS = {
    "bonafide": True, "bona-fide": True, "bona_fide": True, "genuine": True, "real": True, "human": True, "1": True,
    "spoof": False, "spoofed": False, "fake": False, "0": False,
}  # fmt: skip
SUFFIXES = (".wav", ".flac", ".ogg", ".mp3")
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


def find_utterances(raw: Path, split: PackingSettings) -> list[Utterance]:
    """Return every utterance of the databases in a raw folder or its sub-folders, in a fixed order.

    Known layouts: ASVspoof 2019 LA, 2021 LA and DF, ASVspoof 5, `protocol.csv`, Fake-or-Real
    (`{training,validation,testing}/{real,fake}`) and `{bonafide,spoof}/`, or `{real,fake}/`, without sets.

    Raises:
        UserError: a protocol has a wrong line, or nothing is left to train on.
    """
    return assign_sets(list_utterances(raw), split)


def list_utterances(raw: Path) -> list[Utterance]:
    """Return every utterance as `find_utterances`, but without a set where no protocol assigns one.

    Raises:
        UserError: a protocol has a wrong line.
    """
    found: dict[str, Utterance] = {}
    for base in (raw, *sorted(path for path in raw.iterdir() if path.is_dir())):
        for read in READERS:
            for utterance in read(raw, base):
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
        return _read_csv_trials(path)
    text = path.read_text(errors="replace")
    lines = [(number, line.split()) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines:
        raise UserError(f"{path}: the protocol is empty.")
    header = lines[0][1][0].lower() == "filename"
    if header:
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
    _refuse_duplicates(path, [trial.utterance for trial in listed])
    return listed


def read_asv_rates(path: Path) -> AsvRates:
    """Read an ASV score file, `source target|nontarget|spoof score` per line, and return the system's error rates.

    Raises:
        UserError: the file is missing, a line has another format, or a kind of trial is missing.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such ASV score file.")
    groups: dict[str, list[float]] = {"target": [], "nontarget": [], "spoof": []}
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
        words = line.split()
        if not words:
            continue
        try:
            _, kind, score = words
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
        for name, part in ((VAL, "dev"), ("test_2019", "eval")):
            path = base / "ASVspoof2019_LA_asv_scores" / f"ASVspoof2019.LA.asv.{part}.gi.trl.scores.txt"
            if path.is_file():
                found.setdefault(name, path)
    return found


def find_audio_files(folder: Path) -> list[Path]:
    """Return the audio files in a folder and below it, sorted; skips hidden ones."""
    return list_files(folder, SUFFIXES)


def assign_sets(found: list[Utterance], split: PackingSettings) -> list[Utterance]:
    """Assign utterances without a set to one, by speaker or else by file name, so that copies stay together."""
    result = []
    for utterance in found:
        if not utterance.set:
            position = hash_to_fraction(utterance.speaker or Path(utterance.key).stem, split.seed)
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


def _read_csv_trials(path: Path) -> list[Trial]:
    with path.open(newline="") as file:
        table = csv.reader(file)
        header = [name.strip().lower() for name in next(table, [])]
        known = {"path", "label", "attack", "speaker", "set"}
        if not {"path", "label"} <= set(header) <= known:
            raise UserError(
                f"{path}, line 1: expected a header with path and label, optionally attack, speaker and set; "
                f"found '{','.join(header)}'."
            )
        listed = [_parse_csv_row(path, number, header, row) for number, row in enumerate(table, 2) if row]
    _refuse_duplicates(path, [trial.path for trial in listed])
    return listed


def _parse_csv_row(path: Path, number: int, header: list[str], row: list[str]) -> Trial:
    where = f"{path}, line {number}"
    if len(row) != len(header):
        raise UserError(
            f"{where}: expected {len(header)} fields ({','.join(header)}), found {len(row)}: '{','.join(row)}'."
        )
    cell = {name: value.strip() for name, value in zip(header, row, strict=True)}
    if cell["label"].lower() not in WORDS:
        raise UserError(f"{where}: label '{cell['label']}': expected one of {', '.join(WORDS)}.")
    bonafide, set_name = WORDS[cell["label"].lower()], cell.get("set", "")
    if set_name and not re.fullmatch(rf"{TRAIN}|{VAL}|{TEST}(_\w+)?", set_name):
        raise UserError(f"{where}: set '{set_name}': expected {TRAIN}, {VAL}, {TEST} or {TEST}_NAME, or nothing.")
    attack = "-" if bonafide else cell.get("attack") or SPOOF
    name = Path(cell["path"])
    return Trial(name.stem, bonafide, attack, cell.get("speaker", ""), path=name.as_posix(), set=set_name)


def _refuse_duplicates(path: Path, names: Sequence[str]) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise UserError(f"{path}: '{name}' is listed twice. Remove one of its lines.")


# Raw folders


def _find_asvspoof_2019(raw: Path, base: Path) -> Iterator[Utterance]:
    protocols = base / "ASVspoof2019_LA_cm_protocols"
    for part, suffix, set_name in (("train", "trn", TRAIN), ("dev", "trl", VAL), ("eval", "trl", "test_2019")):
        path = protocols / f"ASVspoof2019.LA.cm.{part}.{suffix}.txt"
        if path.is_file():
            yield from _match_trials(raw, read_trials(path), base / f"ASVspoof2019_LA_{part}" / "flac", set_name)


def _find_asvspoof_2021(raw: Path, base: Path) -> Iterator[Utterance]:
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


def _find_asvspoof5(raw: Path, base: Path) -> Iterator[Utterance]:
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


def _find_table(raw: Path, base: Path) -> Iterator[Utterance]:
    path = base / "protocol.csv"
    for trial in read_trials(path) if path.is_file() else ():
        assert trial.bonafide is not None
        file, key = base / trial.path, _make_key(raw, base / trial.path)
        path_if_any = file if file.is_file() else None
        yield Utterance(key, path_if_any, trial.bonafide, trial.attack, trial.speaker, trial.set)


def _find_fake_or_real(raw: Path, base: Path) -> Iterator[Utterance]:
    for part, set_name in (("training", TRAIN), ("validation", VAL), ("testing", TEST)):
        for name, attack in (("real", "-"), ("fake", "fake")):
            for path in find_audio_files(base / part / name):
                yield Utterance(_make_key(raw, path), path, name == "real", attack, "", set_name)


def _find_own_folder(raw: Path, base: Path) -> Iterator[Utterance]:
    """Read `bonafide/[<speaker>/]` and `spoof/[<attack>/[<speaker>/]]`, or any other of `WORDS`."""
    if (base / "protocol.csv").is_file():
        return
    for folder in sorted(path for path in base.iterdir() if path.is_dir() and not path.name.isdecimal()):
        bonafide = WORDS.get(folder.name.lower())
        for path in [] if bonafide is None else find_audio_files(folder):
            *inner, _ = path.relative_to(folder).parts
            attack = "-" if bonafide else inner.pop(0) if inner else SPOOF
            yield Utterance(_make_key(raw, path), path, bool(bonafide), attack, inner[0] if inner else "", "")


READERS: tuple[Callable[[Path, Path], Iterator[Utterance]], ...] = (
    _find_asvspoof_2019,
    _find_asvspoof_2021,
    _find_asvspoof5,
    _find_table,
    _find_fake_or_real,
    _find_own_folder,
)


def _match_trials(raw: Path, listed: Sequence[Trial], folder: Path, set_name: str) -> Iterator[Utterance]:
    """Yield the utterances that a protocol lists, each phase of 2021 as its own set; lists the folder only once."""
    present = {entry.name for entry in os.scandir(folder)} if folder.is_dir() else set()
    for trial in listed:
        if trial.bonafide is None:
            raise UserError(f"{folder}: the protocol lists names only, but training needs the keys.")
        name = next((trial.utterance + end for end in (".flac", ".wav") if trial.utterance + end in present), None)
        key = _make_key(raw, folder / (name or f"{trial.utterance}.flac"))
        trial_set = f"{set_name}_{trial.phase}" if trial.phase else set_name
        yield Utterance(key, folder / name if name else None, trial.bonafide, trial.attack, trial.speaker, trial_set)


def _make_key(raw: Path, path: Path) -> str:
    return path.relative_to(raw).as_posix()
