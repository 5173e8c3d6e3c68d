"""The command line, as a program: `pypto-serving`, `pypto` or `python -m pypto_serving`."""

import signal
import sys


def main() -> int:
    """Run the command line. While its modules are imported, Ctrl-C ends this process in silence."""
    interrupt = signal.getsignal(signal.SIGINT)
    if interrupt is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from pypto_serving.cli import main as run

    signal.signal(signal.SIGINT, interrupt)
    return run()


if __name__ == "__main__":
    sys.exit(main())
