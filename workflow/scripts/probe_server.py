"""Start a server once: real tokens, settings read back, token counts, signs of prefix reuse.

Fails if the server's token counts differ from the client's, or if it reuses prefixes of earlier
prompts; says how it was shown that it does not. Its log stays in attempts/<n> beside the output.
"""

import sys

from fp8flow.probe import main

if __name__ == "__main__":
    sys.exit(main(__doc__))
