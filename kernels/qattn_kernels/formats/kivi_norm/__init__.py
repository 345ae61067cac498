"""KIVI's codes by channel of keys that were divided by their norms. Keys only."""
