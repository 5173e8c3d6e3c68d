"""L3: the engine core, the executor that keeps its worker alive, and the client half in the API process."""
