"""The frames of the package `genset`, without its other modules: importing those is most of a start, and tests start hundreds of
programs that need none of them."""

import os
import sys
import types

package = types.ModuleType("genset")
package.__path__ = [os.path.join(folder, "genset") for folder in os.environ["PYTHONPATH"].split(os.pathsep)]
sys.modules["genset"] = package

from genset._frames import Decoder, Kind, encode, encode_batch, pack, unpack, unpack_request  # noqa: E402

__all__ = ["Decoder", "Kind", "encode", "encode_batch", "pack", "unpack", "unpack_request"]
