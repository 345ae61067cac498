"""KIVI's per-channel codes of keys divided by their norms. Keys only."""
