"""Reads whose print a file is from its name, as the public data sets name their files."""

import re
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reading:
    """A print's finger and impression, read from the path of a file."""

    finger: str  # unique over the folder: two readings with the same finger show the same finger
    impression: int
    set: str
    dpi: int = 0  # 0: the path does not say


class NotOneFinger(Exception):
    """The name belongs to the layout, but the image shows several fingers or a palm."""


@dataclass(frozen=True)
class Layout:
    """One way to read file names."""

    name: str  # value of packing.layout
    title: str  # its name in messages
    expected: str  # shape of the names
    pattern: re.Pattern[str]  # of the whole path relative to the raw folder, "/" between folders, without suffix
    build: Callable[[re.Match[str]], Reading]  # may raise NotOneFinger
    distinctive: bool = True  # False: other data sets may have such names, so one alone says little
    above: str = ""  # front of each path: names of the folders around the raw folder

    def read(self, stem: str) -> Reading | None:
        """Read a path without suffix; None if it does not have this layout's shape.

        Raises:
            NotOneFinger: the image shows several fingers or a palm.
        """
        match = self.pattern.fullmatch(self.above + stem)
        return self.build(match) if match else None


FVC_DPI = {("2002", "2"): 569, ("2004", "3"): 512, ("2006", "1"): 250, ("2006", "2"): 569}
"""Resolutions of FVC's sensors that differ from 500 dpi (the databases pages of fvc2002, fvc2004 and fvc2006)."""

PLAIN_THUMBS = {11: 1, 12: 6}
"""ANSI/NIST-ITL finger positions of thumbs pressed flat: the same fingers as 1 and 6, which are rolled."""

SOCOFING_ALTERED = {None: 1, "cr": 2, "obl": 3, "zcut": 4}


def _build_set(match: re.Match[str]) -> Reading:
    folder, finger = match["folder"] or "", match["finger"]
    return Reading(f"{folder}/{finger}" if folder else finger, int(match["impression"]), folder)


def _build_session(match: re.Match[str]) -> Reading:
    return Reading(match["finger"], int(match["impression"]), match["folder"] or "")


def _build_fvc(match: re.Match[str]) -> Reading:
    name = f"FVC{match['year']}_DB{match['db']}_{match['part']}".upper()
    return Reading(
        f"{name}/{match['finger']}", int(match["impression"]), name, FVC_DPI.get((match["year"], match["db"]), 500)
    )


def _build_sd4(match: re.Match[str]) -> Reading:
    return Reading(match["finger"], 1 if match["roll"].lower() == "f" else 2, "")


def _build_nist(match: re.Match[str]) -> Reading:
    """Read SD300 and SD302: subject and ANSI/NIST finger position make the finger, device and capture the set."""
    position = PLAIN_THUMBS.get(int(match["position"]), int(match["position"]))
    if not 1 <= position <= 10:
        raise NotOneFinger
    made_by = "_".join(part for part in (match.groupdict().get("device"), match["capture"]) if part)
    return Reading(f"{match['subject']}_{position:02d}", 1, made_by, int(match["dpi"] or 0))


def _build_mcyt(match: re.Match[str]) -> Reading:
    return Reading(match["finger"], int(match["impression"]), match["sensor"].lower())


def _build_socofing(match: re.Match[str]) -> Reading:
    finger = f"{int(match['person'])}_{match['hand']}_{match['position']}".lower()
    altered = match["altered"]
    return Reading(finger, SOCOFING_ALTERED[altered and altered.lower()], match["folder"] or "")


def _build_polyu(match: re.Match[str]) -> Reading:
    if match["hrf"]:
        return Reading(match["hrf"], int(match["hrf_impression"]), f"session_{match['hrf_session']}")
    # the processed contactless images are the contactless ones once more, made smaller: one set for both
    sensor = "contactless" if match["contactless"] else "contact"
    finger = match["contactless"] or match["contact"]
    return Reading(finger, int(match["impression"]), f"{sensor}_{match['session'].lower()}")


def _compile(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.IGNORECASE | re.ASCII)


_ANYWHERE = r"(?:.*/)?"
_PLAIN = r"(?:(?P<folder>[^/]+)/)?(?P<finger>[^/]+)_(?P<impression>[0-9]{1,18})"

SETS = Layout(
    "sets", "<set>/<finger>_<impression>", "<finger>_<impression>, such as 101_1", _compile(_PLAIN), _build_set
)
SESSIONS = Layout(
    "sessions",
    "<session>/<finger>_<impression>",
    "<finger>_<impression>, such as 101_1",
    _compile(_PLAIN),
    _build_session,
)
FVC = Layout(
    "fvc",
    "FVC",
    "FVC<year>_DB<n>_<A or B>/<finger>_<impression>, such as FVC2002_DB2_B/101_1, with other folders in between",
    _compile(
        _ANYWHERE + r"FVC(?P<year>2000|2002|2004|2006)[_/](?:[^/]+/)*?DB(?P<db>[1-4])_?(?P<part>[AB])"
        r"(?:/[^/]+)*?/(?P<finger>[0-9]+)_(?P<impression>[0-9]{1,9})"
    ),
    _build_fvc,
)
BARE_FVC = _compile(r"DB(?P<db>[1-4])_?[AB]")
"""The name of a folder of one of FVC's sensors without its year."""

FOLDERS = Layout(
    "folders",
    "<finger>/<impression>",
    "<finger>/<impression>, such as 101/1",
    _compile(r"(?P<finger>.+)/(?P<impression>[0-9]{1,18})"),
    lambda match: Reading(match["finger"], int(match["impression"]), ""),
)
PUBLIC = (
    FVC,
    Layout(
        "sd4",
        "NIST SD4",
        "f<number>_<finger> or s<number>_<finger>, such as f0001_01",
        _compile(_ANYWHERE + r"(?P<roll>[fs])(?P<finger>[0-9]{4}_[0-9]{2})"),
        _build_sd4,
    ),
    Layout(
        "sd14",
        "NIST SD14",
        "F<number> or S<number>, such as F0000001",
        _compile(_ANYWHERE + r"(?P<roll>[fs])(?P<finger>[0-9]{7})"),
        _build_sd4,
    ),
    Layout(
        "sd300",
        "NIST SD300",
        "<subject>_<plain or roll>_<dpi>_<finger>, such as 00001000_roll_500_01",
        _compile(
            _ANYWHERE + r"(?P<subject>[0-9]{8})_(?P<capture>plain|roll)_(?P<dpi>500|1000|2000)_(?P<position>[0-9]{2})"
        ),
        _build_nist,
    ),
    Layout(
        "sd302",
        "NIST SD302",
        "<subject>_<device>_<dpi>_<capture>_<finger>, such as 00002302_R_500_slap_02",
        _compile(
            _ANYWHERE + r"(?P<subject>[0-9]{8})_(?P<device>[A-Z])_(?:(?P<dpi>500|1000|2000)_)?"
            r"(?P<capture>[a-z]+(?:-[a-z]+)?)_(?P<position>[0-9]{2})"
        ),
        _build_nist,
    ),
    Layout(
        "mcyt",
        "MCYT",
        "<dp or pb>_<person>_<finger>_<impression>, such as dp_0000_0_0",
        _compile(_ANYWHERE + r"(?P<sensor>dp|pb)_(?P<finger>[0-9]{4}_[0-9])_(?P<impression>[0-9]{1,2})"),
        _build_mcyt,
    ),
    Layout(
        "socofing",
        "SOCOFing",
        "<person>__<M or F>_<hand>_<finger>_finger, such as 1__M_Left_index_finger",
        _compile(
            r"(?:.*?(?P<folder>[^/]+)/)?(?P<person>[0-9]{1,9})__[MF]_(?P<hand>left|right)_"
            r"(?P<position>thumb|index|middle|ring|little)_finger(?:_(?P<altered>CR|Obl|Zcut))?"
        ),
        _build_socofing,
    ),
    Layout(
        "polyu",
        "PolyU",
        "<finger>_<session>_<impression> (HRF), such as 1_2_3, or first_session/1_1 and first_session/p1/p1",
        _compile(
            _ANYWHERE + r"(?:(?P<hrf>[0-9]+)_(?P<hrf_session>[12])_(?P<hrf_impression>[0-9]{1,2})"
            r"|(?P<session>first|second)_session/(?:p(?P<contactless>[0-9]+)/p|(?P<contact>[0-9]+)_)"
            r"(?P<impression>[0-9]{1,2}))"
        ),
        _build_polyu,
        distinctive=False,
    ),
)
NAMED = {layout.name: layout for layout in (SETS, SESSIONS, FOLDERS, *PUBLIC)}
"""The values of packing.layout besides "auto"."""
