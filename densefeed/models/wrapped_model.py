"""WrappedModel: a model and what is trained beside it, as one module."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from torch import Tensor, nn


class WrappedModel(nn.Module):
    """What a method trains: a module that holds the model and what is trained beside it.

    A checkpoint has the state of every child but the model under the name of the child.

    Attributes:
        networks: those that take images, the model first.
        evaluated: networks that are evaluated beside the model, by their names in metrics
            (`top1_NAME`).
        aliases: tensors that share the memory of parameters and have gradients of their own.
    """

    networks: tuple[nn.Module, ...]
    evaluated: Mapping[str, nn.Module] = MappingProxyType({})
    aliases: Sequence[Tensor] = ()

    def no_weight_decay(self) -> set[str]:
        """Return the exceptions of all children, such as tables, for timm's grouping."""
        return {
            f"{name}.{exception}"
            for name, child in self.named_children()
            for exception in getattr(child, "no_weight_decay", set)()
        }

    def combine_gradients(self, average: Callable[[list[Tensor]], None]) -> None:
        """Change the gradients of a step before they are clipped, without waiting.

        DDP has averaged those of the parameters over ranks; `average` does so for others, in place.
        """


def get_networks(trainable: nn.Module) -> tuple[nn.Module, ...]:
    """Return the networks in what a run trains, the model first."""
    return trainable.networks if isinstance(trainable, WrappedModel) else (trainable,)
