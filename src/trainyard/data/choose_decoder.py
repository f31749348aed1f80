"""Chooses who decodes images and audio."""

import torch

from trainyard.data import decode_torchvision
from trainyard.errors import UserError

_INSTEAD = "data.decode=cpu, or a container image that has DALI."


def choose_decoder(wanted: str, *, importable: bool, device: torch.device = torch.device("cpu")) -> tuple[str, str]:
    """Return the decoder for data.decode=`wanted`, and the reason.

    Args:
        importable: whether DALI is installed.

    Raises:
        UserError: DALI or torchvision is requested, but not installed or not usable.
    """
    if wanted == "cpu":
        return "cpu", "requested"
    if wanted == "torchvision":
        if fault := decode_torchvision.explain_unusable(device):
            raise UserError(f"data.decode=torchvision, but it cannot decode JPEG on {device}: {fault}. Use {_INSTEAD}")
        return "torchvision", "requested"
    if importable:
        return "dali", "requested" if wanted == "dali" else "installed, and bit-equal to the CPU reference on the host"
    if wanted == "dali":
        raise UserError(f"data.decode=dali, but nvidia.dali is not installed here. Use {_INSTEAD}")
    missing = "nvidia.dali is not installed here"
    if device.type != "cuda":
        return "cpu", missing
    if fault := decode_torchvision.explain_unusable(device):
        return "cpu", f"{missing}, and torchvision cannot decode JPEG on {device}: {fault}"
    return "torchvision", (
        f"{missing}; torchvision decodes JPEG on {device}, but on the host what nvJPEG decodes differently: "
        "colour with subsampled chroma, and other formats"
    )
