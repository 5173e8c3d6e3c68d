"""The distribution of one replica over ranks: plain values, for use in every layer."""
