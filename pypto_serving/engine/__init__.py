"""L3: the engine core, the executor that keeps its worker alive, and the API process's side of it."""
