"""What decides before anything starts: options, the resolver, the memory plan, facts of the machine, model files."""
