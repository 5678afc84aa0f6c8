"""Environment of all tests: no hub, locks of their own, no spinning threads on shared cores."""

import os
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Measurements of a user on this host and those of the tests must not wait for each other.
os.environ["FP8FLOW_LOCK_DIR"] = tempfile.mkdtemp(prefix="fp8flow-test-locks-")
