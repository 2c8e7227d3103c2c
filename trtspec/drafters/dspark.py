"""DSpark (2607.05147): DFlash's block with a serial Markov head; see dflash.py, which runs both."""

from trtspec.drafters.dflash import open_dflash as open_dspark

__all__ = ["open_dspark"]
