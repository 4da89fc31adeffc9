# Use the machine's C compiler, with flags like those of conda-forge's compiler packages.
export CC="${FORGE_HOST_CC:-gcc}"
export CFLAGS="-O2 -isystem ${PREFIX:-$CONDA_PREFIX}/include"
export LDFLAGS="-L${PREFIX:-$CONDA_PREFIX}/lib -Wl,-rpath,${PREFIX:-$CONDA_PREFIX}/lib"
