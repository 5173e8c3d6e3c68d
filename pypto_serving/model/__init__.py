"""Model families: a torch-free spec each, and a readable torch program underneath it."""
