"""Addresses that no request can be sent to."""

HOSTILE = [
    "http://[",
    "http://[::1",
    "http://h:99999",
    "http://h:x",
    "http://h:0",
    "http://",
    "http://ü..x",
    "http://..",
    "http://a b",
    "http://h/\r\nX: y",
    "http://h/é",
    "http://h/ x",
    "http://h?a=b",
    "http://h#a",
    "http://name:word@h",
    "http://" + "a" * 300,
    "ftp://h",
    "localhost",
    "",
]
