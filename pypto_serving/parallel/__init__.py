"""How one replica is spread over ranks: values only, for every layer."""
