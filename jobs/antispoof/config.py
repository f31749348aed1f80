"""Every option of the antispoof family."""

from dataclasses import dataclass

from trainyard.settings import TrainConfig, option


@dataclass
class FrontendSettings:
    """From waveform to map, on the device (`frontends.py`)."""

    name: str = option(
        "lfcc60",
        "recipe; spec129 is for 8 kHz, the others for 16 kHz",
        choices=("lfcc60", "lfcc60_nii", "lfcc_hr", "spec257", "cqt432", "mel128", "spec129"),
    )
    mean: str = option(
        "utterance",
        "subtracted from each bin: its mean over the utterance, over three seconds around the frame, or nothing",
        choices=("utterance", "sliding", "none"),
    )


@dataclass
class ModelSettings:
    """The network behind the front end (`network.py`)."""

    name: str = option(
        "seresnet",
        "senet34, senet50: ASSERT; seresnet: full width, attentive pooling; resnet18_oc: AIR, takes 60 bins",
        choices=("senet34", "senet50", "seresnet", "resnet18_oc"),
    )
    layers: list[int] = option(lambda: [2, 2, 2, 2], "blocks of each stage of seresnet; [3,4,6,3] is the larger one")
    dropout: float = option(
        0.3, "probability of dropping a number before the last dense layers of seresnet", low=0, high=0.9
    )


@dataclass
class LossSettings:
    """What decides, and trains (`losses.py`)."""

    name: str = option(
        "wce",
        "cross-entropy weighted by inverse class counts, focal, additive margin, or one class",
        choices=("wce", "focal", "am_softmax", "oc_softmax"),
    )
    gamma: float = option(2.0, "exponent of focal", low=0, high=10)
    scale: float = option(20.0, "factor on the cosines of am_softmax and oc_softmax", low=1, high=256)
    margin: float = option(0.9, "m of am_softmax", low=0, high=2)
    margin_bonafide: float = option(0.9, "cosine above which oc_softmax leaves bona fide speech alone", low=-1, high=1)
    margin_spoof: float = option(0.2, "cosine below which oc_softmax leaves spoofed speech alone", low=-1, high=1)
    lr_scale: float = option(1.0, "factor on the learning rate of oc_softmax's direction", low=0, high=1000)


@dataclass
class DisturbSettings:
    """Random changes of training sounds on the device (`augment.py`)."""

    roll: bool = option(False, "start each sound at a random sample, its beginning following its end")
    rawboost: float = option(0.0, "share of sounds with RawBoost-like noise", low=0, high=1)
    rawboost_kind: str = option(
        "series", "filter, impulses and noise after each other, or filter plus impulses", choices=("series", "parallel")
    )
    codec: float = option(0.0, "share of sounds passed through a telephone's codec", low=0, high=1)
    mask: float = option(0.0, "probability of either mask of SpecAugment", low=0, high=1)
    mask_bins: int = option(20, "largest number of bins masked", low=0)
    mask_frames: int = option(50, "largest number of frames masked", low=0)


@dataclass
class PackingSettings:
    """From raw files to records, and utterances to sets. Changing one means packing again."""

    store: str = option(
        "pcm",
        "how shards hold sound: 16-bit samples, or files' bytes (smaller as FLAC, slower)",
        choices=("pcm", "encoded"),
    )
    rate: str = option(
        "resample", "what happens to files of another rate than sound.rate_hz", choices=("resample", "refuse")
    )
    stereo: str = option("refuse", "what happens to files of several channels", choices=("refuse", "mix"))
    min_s: float = option(0.05, "length in seconds below which a file is no utterance", low=0)
    val_share: float = option(
        0.15, "share that chooses the checkpoint, of what no protocol gives to a set", low=0, high=0.9
    )
    test_share: float = option(0.15, "share tested, of what no protocol gives to a set", low=0, high=0.9)
    seed: int = option(0, "of the cut into sets and of the copies", low=0)
    copies: list[str] = option(
        list, "make the attacks here, by copy synthesis of bona fide recordings: of A01, A02, A03, A04 (vocoders.py)"
    )
    unseen: list[str] = option(list, "those copies that the training set has none of")
    recordings: str = option(
        "(?P<speaker>[^_]+)_.*", "names (without suffix) of the recordings to copy, a pattern with a group `speaker`"
    )
    val_speakers: list[str] = option(
        list, "speakers of the validation set, with copies; [] and no test_speakers: by share"
    )
    test_speakers: list[str] = option(list, "speakers of the test set, with copies")


@dataclass
class Config(TrainConfig):
    """All options of an antispoof job."""

    frontend: FrontendSettings = option(FrontendSettings, "waveform to map")
    model: ModelSettings = option(ModelSettings, "network")
    loss: LossSettings = option(LossSettings, "decision and loss")
    disturb: DisturbSettings = option(DisturbSettings, "augmentation of sounds")
    packing: PackingSettings = option(PackingSettings, "raw files to records, utterances to sets")
