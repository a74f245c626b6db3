"""What the tests of batches share."""

from harness.contents import contents

__all__ = ["contents"]
