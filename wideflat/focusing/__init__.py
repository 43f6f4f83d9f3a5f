"""The strength gamma of the pull: schedules of it, a first value from the data, and one that holds a distance."""

from wideflat.focusing.automatic import automatic_gamma0
from wideflat.focusing.schedule import Focusing
from wideflat.focusing.target_distance import TargetDistance

__all__ = ["Focusing", "TargetDistance", "automatic_gamma0"]
