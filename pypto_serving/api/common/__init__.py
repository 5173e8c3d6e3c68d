"""Share what all endpoint families need: bodies, fields, answers, streams."""
