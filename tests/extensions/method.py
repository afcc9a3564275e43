"""A method of your own: a peer learns beside the model, and each from the other (1706.00384).

python method.py lvvit_micro_ce --peer-weight 0.5 --data ...
"""

from copy import deepcopy
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from densefeed import Batch, Method, Options, register_objective, train
from densefeed.objectives.base import Place, StepContext, WrappedModel
from densefeed.objectives.losses import weighted_mean


@dataclass(frozen=True, kw_only=True)
class PeerOptions(Options):
    """Options of `--peer-weight`."""

    # weight of the agreement with a second network, which is trained too; 0: none
    peer_weight: float = 0.0


class Pair(WrappedModel):
    def __init__(self, model: nn.Module, peer: nn.Module) -> None:
        super().__init__()
        self.model, self.peer = model, peer
        self.networks, self.evaluated = (model, peer), {"peer": peer}

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        return self.model(image), self.peer(image)


@register_objective
class Peer(Method):
    """The loss of each network, and the divergence of each from the other's prediction."""

    name, own = "peer-weight", PeerOptions

    @staticmethod
    def is_on(options: PeerOptions) -> bool:
        return options.peer_weight > 0

    def wrap(self, model: nn.Module, num_classes: int, place: Place) -> Pair:
        peer = deepcopy(model)
        peer.reset_classifier(num_classes)
        return Pair(model, place(peer))

    def loss(self, output: tuple[Tensor, Tensor], batch: Batch, step: StepContext) -> Tensor:
        total = sum(self.base.loss(logits, batch, step) for logits in output)
        for one, other in (output, output[::-1]):
            known, target = (F.log_softmax(x.float(), -1) for x in (one, other.detach()))
            apart_N = F.kl_div(known, target, log_target=True, reduction="none").sum(-1)
            total = total + self.options.peer_weight * weighted_mean(apart_N, batch.weight)
        return total


if __name__ == "__main__":
    train.command()
