"""The one part that is compiled, where there is a C compiler; everything else is in pyproject.toml.

`optional`: an install without a compiler, or without Python's headers, goes on, and copies are issued from Python. The digest
tells a build of this source from one of an earlier source that an editable install left in the tree.
"""

import hashlib
from pathlib import Path

from setuptools import Extension, setup

SOURCE = "graphoffload/runtime/streams/copy.c"
DIGEST = hashlib.sha256((Path(__file__).parent / SOURCE).read_bytes()).hexdigest()

setup(
    ext_modules=[
        Extension(
            "graphoffload.runtime.streams._copy",
            [SOURCE],
            define_macros=[("SOURCE_DIGEST", f'"{DIGEST}"')],
            optional=True,
        )
    ]
)
