"""What the entropic algorithms are compared with: relatives of them, SAM and its family, and an RMSprop."""

from wideflat.baselines.asam import ASAM
from wideflat.baselines.diloco import DiLoCo
from wideflat.baselines.easgd import EASGD
from wideflat.baselines.friendly_sam import FriendlySAM
from wideflat.baselines.gsam import GSAM
from wideflat.baselines.look_sam import LookSAM
from wideflat.baselines.lookahead import Lookahead
from wideflat.baselines.parle import Parle
from wideflat.baselines.rmsprop import TensorFlowRMSprop
from wideflat.baselines.sam import SAM
from wideflat.baselines.snoo import SNOO
from wideflat.baselines.streaming_diloco import StreamingDiLoCo

__all__ = [
    "ASAM",
    "EASGD",
    "GSAM",
    "SAM",
    "SNOO",
    "DiLoCo",
    "FriendlySAM",
    "LookSAM",
    "Lookahead",
    "Parle",
    "StreamingDiLoCo",
    "TensorFlowRMSprop",
]
