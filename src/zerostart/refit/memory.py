"""An image in memory that processes of one machine share: a file without a name.

The trainer makes it, and every other process gets its descriptor over the control wire. It ends with the last
process that has it.
"""

from __future__ import annotations

import fcntl
import mmap
import os

import torch

from zerostart.errors import ReadError, WriteError
from zerostart.refit.image import Image, ImagePart

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def make_memory(image: Image) -> int:
    """Make the file of an image, with all its memory; return its descriptor. Raises WriteError."""
    descriptor = os.memfd_create("zerostart-refit", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        # All of it at once: a page that is missing later would end the process that writes to it.
        os.posix_fallocate(descriptor, 0, image.nbytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except OSError as error:
        os.close(descriptor)
        raise WriteError(
            f"{image.nbytes} bytes of shared memory for the weights cannot be had: {error.strerror}; free "
            "memory, or use zerostart.weight_source"
        ) from error
    return descriptor


class SharedImage:
    """The mapping of an image's memory in this process."""

    def __init__(self, image: Image, descriptor: int) -> None:
        """Map the file, and close its ``descriptor``. Raises ReadError if it is not the image's."""
        if descriptor < 0:
            raise ReadError("the image of the weights came without its memory")
        try:
            # Of a file that could shrink, a missing page would end this process.
            sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS == _SEALS
            if not sealed or os.fstat(descriptor).st_size != image.nbytes:
                raise ReadError(f"the memory of the weights is not the image of {image.nbytes} bytes")
            self._memory = mmap.mmap(descriptor, image.nbytes)
        finally:
            os.close(descriptor)
        self.part = ImagePart(image.layout, 0, torch.frombuffer(self._memory, dtype=torch.uint8))

    def close(self) -> None:
        """Unmap the memory, with the last reference to it."""
        del self.part, self._memory
