"""Turn schemas, tags, tools and choices into a grammar."""
