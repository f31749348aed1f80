"""Chooses who decodes images and audio."""

from trainyard.errors import UserError


def choose_decoder(wanted: str, *, importable: bool) -> tuple[str, str]:
    """Return the decoder for data.decode=`wanted`, and the reason.

    Args:
        importable: whether DALI is installed.

    Raises:
        UserError: DALI is requested, but not installed.
    """
    if wanted == "cpu":
        return "cpu", "requested"
    if importable:
        return "dali", "requested" if wanted == "dali" else "installed, and bit-equal to the CPU reference on the host"
    if wanted == "dali":
        raise UserError(
            "data.decode=dali, but nvidia.dali is not installed here. Use data.decode=cpu, or a container image that "
            "has DALI."
        )
    return "cpu", "nvidia.dali is not installed here"
