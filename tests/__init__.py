"""Tests of both packages. What stands here happens before anything of them is imported."""

import os
import shutil
import tempfile
from pathlib import Path

# Models of this size: threads only get in each other's way. For this process and its children.
os.environ["OMP_NUM_THREADS"] = "1"
# Temporary files are in memory where there is room: a commit of SQLite waits 3 ms for a disk.
_MEMORY, _MIN_BYTES = Path("/dev/shm"), 4 * 2**30
if (
    _MEMORY.is_dir()
    and os.access(_MEMORY, os.W_OK)
    and not os.statvfs(_MEMORY).f_flag & getattr(os, "ST_NOEXEC", 0)  # commands are installed, too
    and shutil.disk_usage(_MEMORY).free >= _MIN_BYTES
):
    os.environ["TMPDIR"] = tempfile.tempdir = str(_MEMORY)
# What the developer's own service is set to is not what the tests are about.
for _name in [name for name in os.environ if name.startswith("NCR_")]:
    if not _name.startswith("NCR_TEST_"):
        del os.environ[_name]
