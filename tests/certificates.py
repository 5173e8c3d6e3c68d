"""Certificates that openssl makes for tests."""

from __future__ import annotations

import subprocess
from pathlib import Path


def make_certificate(folder: Path, name: str) -> Path:
    """A file with a certificate for 127.0.0.1, in `name`'s name, and its key."""
    made = folder / f"{name}.pem"
    key, subject = folder / f"{name}.key", ("-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1")
    kind = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1")
    command = ["openssl", "req", "-x509", *kind, *subject, "-out", str(made), "-keyout", str(key)]
    subprocess.run(command, check=True, capture_output=True)
    made.write_text(made.read_text() + key.read_text())
    return made
