"""An environment that cannot be imported."""

from atroposlib.envs.base import BaseEnv


class Crash(BaseEnv):
    """Needs what is not there."""

    name = "crash"


raise RuntimeError("no data set here")
