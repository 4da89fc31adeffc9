# SPDX-License-Identifier: BSD-3-Clause
"""AMD SMI's Python module of this environment's ROCm SDK.

The SDK ships the module in a folder that Python does not search. It is left there, because it
finds libamd_smi relative to itself, and libamd_smi its own libraries relative to where it lies.
This package takes its place in site-packages and executes it.
"""

import os as _os
from pathlib import Path as _Path

_sdk = _Path(__file__).parents[4] / "opt" / "rocm"
_module = _sdk / "share" / "amd_smi" / "amdsmi"
__path__ = [str(_module)]
_home = _os.environ.get("ROCM_HOME")
try:
    # The module looks in $ROCM_HOME early: another ROCm there would give another library.
    _os.environ["ROCM_HOME"] = str(_sdk)
    exec(compile((_module / "__init__.py").read_bytes(), str(_module / "__init__.py"), "exec"))
except ImportError:
    raise
except Exception as _error:
    # Without a loadable library it raises KeyError and the like. `import torch` survives an
    # ImportError of this module and nothing else.
    raise ImportError(f"the AMD SMI library in {_sdk} does not load: {_error!r}") from _error
finally:
    if _home is None:
        _os.environ.pop("ROCM_HOME", None)
    else:
        _os.environ["ROCM_HOME"] = _home
