"""A module with an encoder, learning rates by depth, and the artifacts of packing next to its weights."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from trainyard.errors import UserError
from trainyard.train.module import AdaptedWeights, DataInfo, TrainModule

from .config import Config
from .network import PriceNetwork, TextNetwork, assign_learning_rates, get_encoder_layers
from .weights import ARTIFACTS_BUFFER, OURS, TEXT_HEAD, adapt_encoder, adapt_run, read_artifacts


class EncoderModule(TrainModule):
    """An encoder with a head.

    Tokenizer, features and price statistics are in a buffer, so a checkpoint is self-contained.
    """

    reads_noise = False

    def __init__(self, network: PriceNetwork | TextNetwork, config: Config, data: DataInfo) -> None:
        super().__init__()
        self.network = network
        self._rates = assign_learning_rates(network, config.rates)
        encoded = json.dumps(dict(data.artifacts), sort_keys=True).encode()
        self.register_buffer(ARTIFACTS_BUFFER, torch.frombuffer(bytearray(encoded), dtype=torch.uint8))

    def repeated_layers(self) -> Iterable[nn.Module]:
        """Return the encoder's layers."""
        return get_encoder_layers(self.network)

    def parameter_groups(self, weight_decay: float) -> list[dict[str, object]]:
        """Return two groups for each learning rate: matrices with weight decay, vectors without."""
        groups: dict[tuple[float, bool], list[nn.Parameter]] = {}
        for parameter, factor in self._rates:
            groups.setdefault((factor, parameter.ndim >= 2), []).append(parameter)
        return [
            {"params": members, "weight_decay": weight_decay if matrix else 0.0, "lr_scale": factor}
            for (factor, matrix), members in sorted(groups.items(), key=lambda entry: entry[0], reverse=True)
        ]

    def adapt_weights(self, tensors: Mapping[str, Tensor]) -> AdaptedWeights:
        """Return the weights of a run of this family, or of a DeBERTa-v3 encoder alone.

        Of a run with the other objective, the encoder alone.
        """
        rest = tuple(name for name in self.state_dict() if not name.startswith(OURS))
        if not any(name.startswith("network.") for name in tensors):
            return replace(adapt_encoder(tensors), new=rest)
        adapted = adapt_run(tensors, read_artifacts(self.state_dict()))
        if any(name.startswith(TEXT_HEAD) for name in rest) == any(name.startswith(TEXT_HEAD) for name in tensors):
            return adapted
        return replace(adapted, new=rest, unused=tuple(name for name in tensors if not name.startswith(OURS)))

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load the weights.

        Raises:
            UserError: the checkpoint has another tokenizer, other features or other price statistics.
        """
        own = cast(Tensor, getattr(self, ARTIFACTS_BUFFER))
        loaded = state_dict.get(ARTIFACTS_BUFFER)
        if loaded is not None and not torch.equal(loaded.cpu(), own.cpu()):
            expected, stored = read_artifacts({ARTIFACTS_BUFFER: own}), read_artifacts({ARTIFACTS_BUFFER: loaded})
            differ = ", ".join(name for name in sorted(expected) if expected[name] != stored.get(name))
            raise UserError(
                f"The checkpoint was trained with another {differ or 'state'} than the one this data was packed with, "
                "so its weights do not fit. Use the data it was trained on, or train on this data from scratch."
            )
        return super().load_state_dict(state_dict, strict=strict, assign=assign)
