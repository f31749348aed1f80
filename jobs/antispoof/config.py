"""Every option of the antispoof family."""

from dataclasses import dataclass

from trainyard.config.settings import PackingPace, TrainConfig, option


@dataclass
class FrontendSettings:
    """Turns waveforms into feature maps on the device (`frontends.py`)."""

    name: str = option(
        "lfcc60",
        "recipe; lfcc60_8k and spec129 are for 8 kHz, wave (no recipe, for aasist) for any rate, the others for 16 kHz",
        choices=("lfcc60", "lfcc60_nii", "lfcc_hr", "spec257", "cqt432", "mel128", "lfcc60_8k", "spec129", "wave"),
    )
    mean: str = option(
        "utterance",
        "what to subtract from each bin: its mean over the utterance, over three seconds around the frame, or nothing; "
        "standard: also divide by its deviation over the utterance",
        choices=("utterance", "sliding", "standard", "none"),
    )
    slopes: str = option(
        "htk",
        "lfcc60: deltas per frame, or 28 times as large (double deltas 784), as MATLAB baselines have them",
        choices=("htk", "matlab"),
    )


@dataclass
class ModelSettings:
    """The network after the front end (`network.py`)."""

    name: str = option(
        "seresnet",
        "senet34, senet50: ASSERT; seresnet: full width, attentive pooling; resnet18_oc: AIR, takes 60 bins; aasist: "
        "takes the waveform",
        choices=("senet34", "senet50", "seresnet", "resnet18_oc", "aasist"),
    )
    layers: list[int] = option(lambda: [2, 2, 2, 2], "seresnet: blocks per stage; [3,4,6,3] is the larger network")
    dropout: float = option(0.3, "seresnet: dropout probability before the last dense layers", low=0, high=0.9)


@dataclass
class LossSettings:
    """The classification head and its loss (`losses.py`)."""

    name: str = option(
        "wce",
        "cross-entropy weighted by inverse class counts, focal, additive margin, or one-class",
        choices=("wce", "focal", "am_softmax", "oc_softmax"),
    )
    gamma: float = option(2.0, "focal: exponent", low=0, high=10)
    scale: float = option(20.0, "am_softmax, oc_softmax: factor on the cosines", low=1, high=256)
    margin: float = option(0.9, "am_softmax: margin m", low=0, high=2)
    margin_bonafide: float = option(0.9, "oc_softmax: cosine that bona fide speech should exceed", low=-1, high=1)
    margin_spoof: float = option(0.2, "oc_softmax: cosine that spoofed speech should stay below", low=-1, high=1)
    lr_scale: float = option(1.0, "oc_softmax: factor on the learning rate of its direction", low=0, high=1000)


@dataclass
class DisturbSettings:
    """Augmentation of training utterances on the device (`augment.py`)."""

    roll: bool = option(False, "rotate each utterance to start at a random sample")
    reverb: float = option(0.0, "share of utterances with the reverberation of a drawn room", low=0, high=1)
    rawboost: float = option(0.0, "share of utterances with RawBoost-like noise", low=0, high=1)
    rawboost_kind: str = option(
        "series",
        "filter, impulses and noise one after the other, or filter plus impulses",
        choices=("series", "parallel"),
    )
    codec: float = option(0.0, "share of utterances passed through a telephone codec", low=0, high=1)
    mask: float = option(0.0, "probability of either mask of SpecAugment", low=0, high=1)
    mask_bins: int = option(20, "largest number of bins masked", low=0)
    mask_frames: int = option(50, "largest number of frames masked", low=0)


@dataclass
class PackingSettings:
    """How raw files become records, and which set an utterance belongs to. A change means packing again."""

    store: str = option(
        "pcm",
        "audio in shards: 16-bit samples, or the files' bytes (smaller as FLAC, slower)",
        choices=("pcm", "encoded"),
    )
    rate: str = option(
        "resample", "what to do with files of another rate than sound.rate_hz", choices=("resample", "refuse")
    )
    stereo: str = option("refuse", "what to do with files of several channels", choices=("refuse", "mix"))
    bonafide_label: str = option(
        "none", "label that means bona fide in a table whose labels are codes, such as 1; every other one means spoofed"
    )
    min_s: float = option(0.05, "shortest utterance in seconds; shorter files are refused", low=0)
    val_share: float = option(
        0.15, "validation share of the utterances that no protocol assigns to a set", low=0, high=0.9
    )
    test_share: float = option(0.15, "test share of the utterances that no protocol assigns to a set", low=0, high=0.9)
    seed: int = option(0, "of the split into sets and of the copies", low=0)
    copies: list[str] = option(
        list, "attacks to make by copy synthesis of bona fide recordings: any of A01, A02, A03, A04 (vocoders.py)"
    )
    unseen: list[str] = option(list, "copies to leave out of the training set")
    logistic: bool = option(
        False,
        "also fit logistic regression on pooled spectra of the training files, read twice for it: the network learns "
        "what to add to its log-odds",
    )
    recordings: str = option(
        "(?P<speaker>[^_]+)_.*",
        "regular expression with a group `speaker`: names (without suffix) of recordings to copy",
    )
    val_speakers: list[str] = option(
        list, "speakers of the validation set, with copies; if this and test_speakers are []: by share"
    )
    test_speakers: list[str] = option(list, "speakers of the test set, with copies")


@dataclass
class EvaluationSettings:
    """How trials are scored."""

    bootstrap_draws: int = option(1000, "resamples of the speakers behind each 95 % interval; 0: none", low=0)


@dataclass
class Config(TrainConfig):
    """All options of an antispoof job."""

    packing_pace = PackingPace(0.014, 0.0003, 17.5)

    frontend: FrontendSettings = option(FrontendSettings, "waveforms to feature maps")
    model: ModelSettings = option(ModelSettings, "network")
    loss: LossSettings = option(LossSettings, "classification head and loss")
    disturb: DisturbSettings = option(DisturbSettings, "augmentation of utterances")
    packing: PackingSettings = option(PackingSettings, "raw files to records, utterances to sets")
    evaluation: EvaluationSettings = option(EvaluationSettings, "scoring", mutable_on_resume=True)

    def explain_batch_dependence(self) -> str:
        """Return why results depend on the micro-batch; "" if they do not."""
        return "BatchNorm statistics are over a micro-batch"

    def explain_varying_inputs(self) -> str:
        """Return why repeated layers get inputs of many shapes; "" if they do not."""
        return ""
