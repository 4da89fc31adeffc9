#!/usr/bin/env bash
# Install the activation scripts of the package that is being built, if it has any.
set -euo pipefail
part=${PKG_NAME#rocm-sdk-}
for when in activate deactivate; do
    script=$RECIPE_DIR/activation/$part-$when.sh
    if [ -e "$script" ]; then
        mkdir -p "$PREFIX/etc/conda/$when.d"
        sed "s/@VERSION@/$PKG_VERSION/; s/@GPU_ARCH@/$GPU_ARCH/" "$script" > "$PREFIX/etc/conda/$when.d/rocm-sdk-$part.sh"
    fi
done
