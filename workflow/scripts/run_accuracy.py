"""Collect the answers to every sample of one scenario with LoadGen and a server of its own.

The server lives as long as this command and never longer. Logs of every attempt stay in
attempts/<n> beside the output. Exit status 1: server or load generator did not last until the end.
A run that ended but whose queries failed is recorded with state failed.
"""

import sys

from fp8flow.load_job import main

if __name__ == "__main__":
    sys.exit(main("accuracy", __doc__))
