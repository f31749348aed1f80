"""Chooses who decodes images and audio."""

from trainyard.choice import Choice
from trainyard.errors import UserError


def choose_decoder(wanted: str, *, importable: bool) -> Choice[str]:
    """Return the decoder for data.decode=`wanted`.

    Args:
        importable: whether DALI is installed.

    Raises:
        UserError: DALI is requested, but not installed.
    """
    if wanted == "cpu":
        return Choice("cpu", "requested")
    if importable:
        reason = "requested" if wanted == "dali" else "installed, and bit-equal to the CPU reference on the host"
        return Choice("dali", reason)
    if wanted == "dali":
        raise UserError(
            "data.decode=dali, but nvidia.dali is not installed here. Use data.decode=cpu, or a container image that "
            "has DALI."
        )
    return Choice("cpu", "nvidia.dali is not installed here")
