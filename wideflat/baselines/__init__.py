"""What the entropic algorithms are compared with: Lookahead, EASGD, Parle (relatives of them), SAM, and an RMSprop."""

from wideflat.baselines.easgd import EASGD
from wideflat.baselines.lookahead import Lookahead
from wideflat.baselines.parle import Parle
from wideflat.baselines.rmsprop import TensorFlowRMSprop
from wideflat.baselines.sam import SAM

__all__ = ["EASGD", "SAM", "Lookahead", "Parle", "TensorFlowRMSprop"]
