# The machine's C compiler, with the flags that conda-forge's compiler packages set in substance.
export CC="${FORGE_HOST_CC:-gcc}"
export CFLAGS="-O2 -isystem ${PREFIX:-$CONDA_PREFIX}/include"
export LDFLAGS="-L${PREFIX:-$CONDA_PREFIX}/lib -Wl,-rpath,${PREFIX:-$CONDA_PREFIX}/lib"
