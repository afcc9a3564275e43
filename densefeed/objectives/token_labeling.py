"""Token Labeling (arXiv 2104.10858): a dense label for every token."""

from dataclasses import dataclass

from torch import Tensor

from densefeed.models.token_transformer import TokenFeatures, TokenLogits
from densefeed.objectives.base import DenseObjective, StepContext
from densefeed.objectives.losses import token_labeling_loss
from densefeed.pipelines.batch import Batch
from densefeed.system.errors import UserError
from densefeed.system.options import NonNegative, Options


@dataclass(frozen=True, kw_only=True)
class TokenLabelingOptions(Options):
    """Options of --objective token-label."""

    # weight of the tokens' loss, beta of equation 7
    token_weight: NonNegative = 0.5


class TokenLabeling(DenseObjective):
    """`--objective token-label`: equation 7, for models with a head on every token."""

    name = "token-label"
    needs_tokens = True
    own, section = TokenLabelingOptions, "token_labeling"

    def loss(self, output: TokenLogits | TokenFeatures, batch: Batch, step: StepContext) -> Tensor:
        if not hasattr(output, "tokens"):
            raise UserError(
                f"{self.setting.model} returns a {type(output).__name__} in training, and "
                f"{self.flag} needs TokenLogits(cls, tokens); return it as docs/extending.md "
                "describes"
            )
        targets = self.targets(batch, step)
        return token_labeling_loss(output, *targets, self.options.token_weight)
