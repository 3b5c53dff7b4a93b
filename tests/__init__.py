"""Tests of both packages. What stands here happens before anything of them is imported."""

import os

# Models of this size: threads only get in each other's way. For this process and its children.
os.environ["OMP_NUM_THREADS"] = "1"
# What the developer's own service is set to is not what the tests are about.
for _name in [name for name in os.environ if name.startswith("NCR_")]:
    if not _name.startswith("NCR_TEST_"):
        del os.environ[_name]
