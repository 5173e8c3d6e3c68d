"""Carry requests and answers: sockets, connections, limits, keys, errors. Knows no endpoint."""
