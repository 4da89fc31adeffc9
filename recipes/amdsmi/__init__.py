# SPDX-License-Identifier: BSD-3-Clause
"""AMD SMI's Python module, from this environment's ROCm SDK.

The SDK has the module in a folder that Python does not search. The module cannot be moved, because
it finds libamd_smi relative to its own path, and libamd_smi finds its libraries in the same way. So
this package, which is in site-packages, executes the code of the module in the SDK.
"""

import os as _os
from pathlib import Path as _Path

_sdk = _Path(__file__).parents[4] / "opt" / "rocm"
_module = _sdk / "share" / "amd_smi" / "amdsmi"
__path__ = [str(_module)]
_home = _os.environ.get("ROCM_HOME")
try:
    # The module looks for the library in $ROCM_HOME, which could name another ROCm.
    _os.environ["ROCM_HOME"] = str(_sdk)
    exec(compile((_module / "__init__.py").read_bytes(), str(_module / "__init__.py"), "exec"))
except ImportError:
    raise
except Exception as _error:
    # If the library cannot be loaded, the module raises KeyError or other exceptions. Convert them
    # to ImportError, because `import torch` ignores only an ImportError of this module.
    raise ImportError(f"the AMD SMI library in {_sdk} cannot be loaded: {_error!r}") from _error
finally:
    if _home is None:
        _os.environ.pop("ROCM_HOME", None)
    else:
        _os.environ["ROCM_HOME"] = _home
