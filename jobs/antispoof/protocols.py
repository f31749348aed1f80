"""What the databases and people's own folders say of each utterance: file, label, attack, speaker, set.

A protocol file is read by `trials`; a raw folder, which holds one or several databases, by `utterances`.
"""

import csv
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trainyard.errors import UserError

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
    bonafide: bool | None  # None: the protocol lists names alone
    attack: str = "-"
    speaker: str = ""
    phase: str = ""  # of 2021: progress, eval or hidden
    path: str = ""  # of a CSV
    set: str = ""  # of a CSV


@dataclass(frozen=True)
class Utterance:
    """One sound of a raw folder."""

    key: str  # unique: the file's path relative to the raw folder
    path: Path | None  # None: listed, but not there
    bonafide: bool
    attack: str  # "-": bona fide
    speaker: str  # "": unknown
    set: str  # train, val, test or test_...; "": to be cut


@dataclass(frozen=True)
class Cut:
    """How utterances that no protocol gives to a set are dealt out, by speaker where that is known."""

    val_share: float
    test_share: float
    seed: int


def utterances(raw: Path, cut: Cut) -> list[Utterance]:
    """Return every utterance of the databases in a raw folder or in its sub-folders, in a fixed order.

    Known forms: ASVspoof 2019 LA, 2021 LA and DF, ASVspoof 5, `protocol.csv`, Fake-or-Real
    (`{training,validation,testing}/{real,fake}`) and `{bonafide,spoof}/`, or `{real,fake}/`, without sets.

    Raises:
        UserError: a protocol has a wrong line, or nothing is left to train on.
    """
    found: dict[str, Utterance] = {}
    for base in (raw, *sorted(path for path in raw.iterdir() if path.is_dir())):
        for form in FORMS:
            for one in form(raw, base):
                found.setdefault(one.key, one)  # `training/real` is also somebody's own folder `real`
    return dealt_out(list(found.values()), cut)


def trials(path: Path) -> list[Trial]:
    """Read a protocol; its form is told from its first line, and every other line must have it too.

    Forms: the 5 fields of ASVspoof 2019, the 8 and more of 2021, those of ASVspoof 5 (utterance second, the key
    wherever it stands), `filename cm-label` with that header, CSV with a header, and a list of names.

    Raises:
        UserError: no such file, no known form, or a line of another one.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such protocol file.")
    if path.suffix == ".csv":
        return _csv_trials(path)
    text = path.read_text(errors="replace")
    lines = [(number, line.split()) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines:
        raise UserError(f"{path}: the protocol is empty.")
    header = lines[0][1][0].lower() == "filename"
    if header:
        lines = lines[1:]
    form, fields = _form_of(path, lines[0][1] if lines else [], header)
    read: list[Trial] = []
    for number, words in lines:
        if len(words) != fields:
            raise UserError(
                f"{path}, line {number}: expected {fields} fields, as in the first line, found {len(words)}: "
                f"'{' '.join(words)}'. Mend or remove the line."
            )
        try:
            read.append(form(words))
        except ValueError as error:
            raise UserError(
                f"{path}, line {number}: {error} in '{' '.join(words)}'. Mend or remove the line."
            ) from None
    _refuse_doubles(path, [trial.utterance for trial in read])
    return read


def asv_rates(path: Path) -> AsvRates:
    """Read an ASV score file, `source target|nontarget|spoof score` per line, and return the system's error rates.

    Raises:
        UserError: no such file, a line of another form, or a kind of trial is missing.
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
        return AsvRates.of(groups["target"], groups["nontarget"], groups["spoof"])
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def asv_files(raw: Path) -> dict[str, Path]:
    """Return the ASV score files of ASVspoof 2019 in a raw folder, by the set they belong to.

    The validation set has its own: the scores of the evaluation set would make its t-DCF wrong.
    """
    names = {
        VAL: "ASVspoof2019.LA.asv.dev.gi.trl.scores.txt",
        "test_2019": "ASVspoof2019.LA.asv.eval.gi.trl.scores.txt",
    }
    found: dict[str, Path] = {}
    for base in (raw, *sorted(path for path in raw.iterdir() if path.is_dir())):
        for name, file in names.items():
            path = base / "ASVspoof2019_LA_asv_scores" / file
            if path.is_file() and name not in found:
                found[name] = path
    return found


def sounds(folder: Path) -> list[Path]:
    """Return the sound files in a folder and below it, sorted; hidden ones are passed over."""
    found: list[Path] = []
    for where, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [Path(where) / name for name in names if name.lower().endswith(SUFFIXES) and not name.startswith(".")]
    return sorted(found)


def dealt_out(found: list[Utterance], cut: Cut) -> list[Utterance]:
    """Give the utterances without a set to one: whole speakers, or whole file names, so that copies stay together."""
    result = []
    for one in found:
        if not one.set:
            place = fraction(one.speaker or Path(one.key).stem, cut.seed)
            name = TEST if place < cut.test_share else VAL if place < cut.test_share + cut.val_share else TRAIN
            one = replace(one, set=name)
        result.append(one)
    names = sorted({one.set for one in result})
    if names and TRAIN not in names:
        raise UserError(
            f"No utterance is left to train on: the raw folder holds {', '.join(names)}. "
            "To score sounds with a trained model: trainyard predict RUN FOLDER OUT.csv"
        )
    return result


def fraction(text: str, seed: int) -> float:
    """Return a number in [0, 1) that is a hash of a text: who is dealt out by it stays where he is as data grow."""
    digest = hashlib.blake2b(f"{seed}:{text}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) / 2**64


# Lines


def _form_of(path: Path, words: list[str], header: bool) -> tuple[Callable[[list[str]], Trial], int]:
    if header and len(words) == 2:
        return _key_line, 2
    if len(words) == 1:
        return _name_line, 1
    if len(words) == 5 and words[4] in (BONAFIDE, SPOOF):
        return _line_2019, 5
    if len(words) >= 8 and words[5] in (BONAFIDE, SPOOF):
        return _line_2021, len(words)
    if len(words) >= 6 and {BONAFIDE, SPOOF} & set(words):
        return _line_5, len(words)
    raise UserError(
        f"{path}, line 1: found {len(words)} fields: '{' '.join(words)}'. Expected 5 (ASVspoof 2019: speaker utterance "
        "- attack bonafide|spoof), 8 or more (2021: the key is the sixth), 6 or more with a key among them (ASVspoof "
        "5), a header 'filename cm-label', one name per line, or a .csv file."
    )


def _line_2019(words: list[str]) -> Trial:
    return Trial(words[1], _key(words[4]), words[3], words[0])


def _line_2021(words: list[str]) -> Trial:
    return Trial(words[1], _key(words[5]), words[4], words[0], phase=words[7])


def _line_5(words: list[str]) -> Trial:
    """The utterance is second, the key is the last field that is one, and the attack stands before it."""
    at = max((i for i, word in enumerate(words) if word in (BONAFIDE, SPOOF)), default=-1)
    if at < 3:
        raise ValueError("no bonafide or spoof from the fourth field on")
    bonafide = words[at] == BONAFIDE
    return Trial(words[1], bonafide, "-" if bonafide else words[at - 1], words[0])


def _name_line(words: list[str]) -> Trial:
    return Trial(words[0], None)


def _key_line(words: list[str]) -> Trial:
    return Trial(words[0], _key(words[1]))


def _key(word: str) -> bool:
    if word not in (BONAFIDE, SPOOF):
        raise ValueError(f"expected bonafide or spoof, found '{word}'")
    return word == BONAFIDE


def _csv_trials(path: Path) -> list[Trial]:
    with path.open(newline="") as file:
        table = csv.reader(file)
        header = [name.strip().lower() for name in next(table, [])]
        known = {"path", "label", "attack", "speaker", "set"}
        if not {"path", "label"} <= set(header) <= known:
            raise UserError(
                f"{path}, line 1: expected a header with path and label, and if you like attack, speaker and set; "
                f"found '{','.join(header)}'."
            )
        read = [_csv_trial(path, number, header, row) for number, row in enumerate(table, 2) if row]
    _refuse_doubles(path, [trial.path for trial in read])
    return read


def _csv_trial(path: Path, number: int, header: list[str], row: list[str]) -> Trial:
    where = f"{path}, line {number}"
    if len(row) != len(header):
        raise UserError(
            f"{where}: expected {len(header)} fields ({','.join(header)}), found {len(row)}: '{','.join(row)}'."
        )
    cell = {name: value.strip() for name, value in zip(header, row, strict=True)}
    if cell["label"].lower() not in WORDS:
        raise UserError(f"{where}: label '{cell['label']}': expected one of {', '.join(WORDS)}.")
    bonafide, wanted = WORDS[cell["label"].lower()], cell.get("set", "")
    if wanted and not re.fullmatch(rf"{TRAIN}|{VAL}|{TEST}(_\w+)?", wanted):
        raise UserError(f"{where}: set '{wanted}': expected {TRAIN}, {VAL}, {TEST} or {TEST}_NAME, or nothing.")
    attack = "-" if bonafide else cell.get("attack") or SPOOF
    name = Path(cell["path"])
    return Trial(name.stem, bonafide, attack, cell.get("speaker", ""), path=name.as_posix(), set=wanted)


def _refuse_doubles(path: Path, names: Sequence[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise UserError(f"{path}: '{name}' is listed twice. Remove one of its lines.")
        seen.add(name)


# Raw folders


def _asv2019(raw: Path, base: Path) -> Iterator[Utterance]:
    protocols = base / "ASVspoof2019_LA_cm_protocols"
    for part, suffix, set_name in (("train", "trn", TRAIN), ("dev", "trl", VAL), ("eval", "trl", "test_2019")):
        path = protocols / f"ASVspoof2019.LA.cm.{part}.{suffix}.txt"
        if path.is_file():
            yield from _listed(raw, trials(path), base / f"ASVspoof2019_LA_{part}" / "flac", set_name)


def _asv2021(raw: Path, base: Path) -> Iterator[Utterance]:
    for track in ("LA", "DF"):
        sound = base / f"ASVspoof2021_{track}_eval" / "flac"
        if not sound.is_dir():
            continue
        places = [base / "keys" / track / "CM", base / "keys" / "CM", sound.parent, base]
        metadata = next((p / "trial_metadata.txt" for p in places if (p / "trial_metadata.txt").is_file()), None)
        if metadata is None:
            raise UserError(
                f"{sound.parent}: its keys are missing. Expected {places[0] / 'trial_metadata.txt'}. To score sounds "
                "without keys: trainyard predict RUN FOLDER OUT.csv"
            )
        yield from _listed(raw, trials(metadata), sound, f"test_2021_{track.lower()}")


def _asv5(raw: Path, base: Path) -> Iterator[Utterance]:
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
                sound = next((base / name for name in folders if (base / name).is_dir()), base / folders[0])
                yield from _listed(raw, trials(path), sound, set_name)
                break


def _table(raw: Path, base: Path) -> Iterator[Utterance]:
    path = base / "protocol.csv"
    for trial in trials(path) if path.is_file() else ():
        assert trial.bonafide is not None
        file = base / trial.path
        yield Utterance(
            _key_of(raw, file), file if file.is_file() else None, trial.bonafide, trial.attack, trial.speaker, trial.set
        )


def _fake_or_real(raw: Path, base: Path) -> Iterator[Utterance]:
    for part, set_name in (("training", TRAIN), ("validation", VAL), ("testing", TEST)):
        for name in ("real", "fake"):
            for path in sounds(base / part / name):
                yield Utterance(
                    _key_of(raw, path), path, name == "real", "-" if name == "real" else "fake", "", set_name
                )


def _own_folder(raw: Path, base: Path) -> Iterator[Utterance]:
    """`bonafide/[<speaker>/]` and `spoof/[<attack>/[<speaker>/]]`, in any of the words for them."""
    if (base / "protocol.csv").is_file():
        return
    for folder in sorted(path for path in base.iterdir() if path.is_dir() and not path.name.isdecimal()):
        bonafide = WORDS.get(folder.name.lower())
        for path in [] if bonafide is None else sounds(folder):
            *inner, _ = path.relative_to(folder).parts
            attack = "-" if bonafide else inner.pop(0) if inner else SPOOF
            yield Utterance(_key_of(raw, path), path, bool(bonafide), attack, inner[0] if inner else "", "")


FORMS: tuple[Callable[[Path, Path], Iterator[Utterance]], ...] = (
    _asv2019,
    _asv2021,
    _asv5,
    _table,
    _fake_or_real,
    _own_folder,
)


def _listed(raw: Path, listed: Sequence[Trial], folder: Path, set_name: str) -> Iterator[Utterance]:
    """Yield what a protocol lists, each phase of 2021 as a set; one look at the folder tells what is there."""
    present = {entry.name for entry in os.scandir(folder)} if folder.is_dir() else set()
    for trial in listed:
        if trial.bonafide is None:
            raise UserError(f"{folder}: the protocol lists names alone, and training needs the keys.")
        name = next((trial.utterance + end for end in (".flac", ".wav") if trial.utterance + end in present), None)
        key = _key_of(raw, folder / (name or f"{trial.utterance}.flac"))
        place = f"{set_name}_{trial.phase}" if trial.phase else set_name
        yield Utterance(key, folder / name if name else None, trial.bonafide, trial.attack, trial.speaker, place)


def _key_of(raw: Path, path: Path) -> str:
    return path.relative_to(raw).as_posix()
